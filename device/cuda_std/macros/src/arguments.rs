//! The struct that holds what a launch passes, with the names and types of a kernel's parameters.
//!
//! Invariant: its words are those of the parameters, in their order.

use super::{Kind, Parameter, parameter};
use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Attribute, Field, FnArg, Ident, Token, Visibility, braced, parenthesized};

/// What `arguments!` is given.
pub(super) struct Family {
    documents: Vec<Attribute>,
    visibility: Visibility,
    name: Ident,
    choice: Field,
    parameters: Punctuated<FnArg, Token![,]>,
}

impl Parse for Family {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let (documents, visibility) = (input.call(Attribute::parse_outer)?, input.parse()?);
        input.parse::<Token![struct]>()?;
        let name = input.parse()?;
        let (chosen, passed);
        braced!(chosen in input);
        parenthesized!(passed in input);
        let choice = chosen.call(Field::parse_named)?;
        Ok(Self { documents, visibility, name, choice, parameters: passed.parse_terminated(FnArg::parse, Token![,])? })
    }
}

impl Family {
    pub(super) fn expand(&self) -> syn::Result<Tokens> {
        let parameters = self.parameters.iter().map(parameter).collect::<syn::Result<Vec<_>>>()?;
        Ok(typed(&self.documents, &self.visibility, &self.name, Some(&self.choice), &parameters))
    }
}

/// Whether one of the parameters is memory, which the struct borrows.
pub(super) fn borrow(parameters: &[Parameter]) -> bool {
    parameters.iter().any(|parameter| !matches!(parameter.kind, Kind::Scalar(_)))
}

/// The struct of the parameters, and how it is packed; `choice`: a field of it that no kernel is passed.
pub(super) fn typed(
    documents: &[Attribute],
    visibility: &Visibility,
    name: &Ident,
    choice: Option<&Field>,
    parameters: &[Parameter],
) -> Tokens {
    let (lifetime, elided) = if borrow(parameters) { (quote!(<'a>), quote!(<'_>)) } else { (quote!(), quote!()) };
    let launch = quote!(::cuda_std::launch);
    let choice = choice.map(|Field { ident, ty, .. }| quote!(#[doc = "Which kernel is launched."] pub #ident: #ty,));
    let fields = parameters.iter().map(|Parameter { name, kind, docs }| {
        let ty = match kind {
            Kind::Slice(element) => quote!(#launch::Slice<'a, #element>),
            Kind::Pointer(element) => quote!(#launch::Pointer<'a, #element>),
            Kind::PointerMut(element) => quote!(#launch::PointerMut<'a, #element>),
            Kind::Scalar(scalar) => quote!(#scalar),
        };
        let text = format!("The kernel's parameter `{name}`.");
        quote!(#(#docs)* #[doc = #text] pub #name: #ty)
    });
    let packed = parameters.iter().map(|Parameter { name, .. }| quote!(#launch::Argument::pack(&self.#name, words)));
    let pointers = parameters.iter().filter(|p| !matches!(p.kind, Kind::Scalar(_))).map(|p| p.name.to_string());
    let text = name.to_string();
    quote! {
        #[cfg(not(target_arch = "nvptx64"))]
        #(#documents)*
        #[allow(non_camel_case_types)]
        #[derive(Debug)]
        #visibility struct #name #lifetime { #choice #(#fields),* }

        // SAFETY: each field packs itself, and only types of `launch` can: a `Slice` two words, anything else one.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl #launch::Arguments for #name #elided {
            const NAME: &'static str = #text;
            const POINTERS: &'static [&'static str] = &[#(#pointers),*];
            fn pack(&self, words: &mut #launch::Words) {
                #(#packed;)*
            }
        }
    }
}
