//! `#[derive(HostBatch)]`: a struct of arrays becomes a batch whose inputs have the names of its
//! fields.
//!
//! Use it through the crate `stepscope`, whose names the generated code contains. Invariant: the
//! inputs are in the order of the fields, and a struct without fields does not compile.

#![forbid(unsafe_code)]

use proc_macro::TokenStream;
use proc_macro2::{Span, TokenStream as Tokens};
use quote::quote;
use syn::{Data, DeriveInput, Error, Fields, Member, Result, parse_macro_input};

/// Implements `HostBatch` for a struct whose fields are `HostArray`s. Each field is an input with
/// the field's name. Fields of a tuple struct have only their numbers.
#[proc_macro_derive(HostBatch)]
pub fn derive_host_batch(item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as DeriveInput);
    expand(&item).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(item: &DeriveInput) -> Result<Tokens> {
    let refused = |what| Err(Error::new_spanned(&item.ident, what));
    let Data::Struct(data) = &item.data else { return refused("`HostBatch` can be derived for structs only") };
    let members: Vec<Member> = data.fields.members().collect();
    if members.is_empty() {
        return refused("a batch needs at least one field, whose length is the number of samples");
    }
    let names = members.iter().map(|member| match (&data.fields, member) {
        (Fields::Named(_), Member::Named(name)) => name.to_string().trim_start_matches("r#").to_owned(),
        _ => String::new(),
    });
    let (name, (generics, arguments, bounds)) = (&item.ident, item.generics.split_for_impl());
    let array = quote!(::stepscope::train::HostArray);
    let inputs = syn::Ident::new("inputs", Span::mixed_site());
    Ok(quote! {
        impl #generics ::stepscope::HostBatch for #name #arguments #bounds {
            fn len(&self) -> usize {
                [#(#array::samples(&self.#members)),*].into_iter().flatten().next().unwrap_or(0)
            }

            fn inputs(&self) -> ::stepscope::Result<::stepscope::HostInputs<'_>> {
                let #inputs = ::stepscope::HostInputs::new();
                #(let #inputs = #array::append(&self.#members, #inputs, ::stepscope::HostBatch::len(self), #names)?;)*
                Ok(#inputs)
            }
        }
    })
}
