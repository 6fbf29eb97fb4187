//! The argument struct of a launch, with the names and types of a kernel's parameters.
//!
//! Invariant: its words are those of the parameters, in their order.

use super::{Kind, Parameter, parameter};
use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Attribute, Field, FnArg, Ident, Token, Visibility, braced, parenthesized, token};

/// The input of `arguments!`.
pub(super) struct Family {
    documents: Vec<Attribute>,
    visibility: Visibility,
    name: Ident,
    stored: Option<Ident>,
    choice: Option<Field>,
    parameters: Punctuated<FnArg, Token![,]>,
}

impl Parse for Family {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let (documents, visibility) = (input.call(Attribute::parse_outer)?, input.parse()?);
        input.parse::<Token![struct]>()?;
        let name = input.parse()?;
        let mut stored = None;
        if input.parse::<Option<Token![<]>>()?.is_some() {
            stored = Some(input.parse()?);
            input.parse::<Token![>]>()?;
        }
        let mut choice = None;
        if input.peek(token::Brace) {
            let chosen;
            braced!(chosen in input);
            choice = Some(chosen.call(Field::parse_named)?);
        }
        let passed;
        parenthesized!(passed in input);
        let parameters = passed.parse_terminated(FnArg::parse, Token![,])?;
        Ok(Self { documents, visibility, name, stored, choice, parameters })
    }
}

impl Family {
    pub(super) fn expand(&self) -> syn::Result<Tokens> {
        let parameters = self.parameters.iter().map(parameter).collect::<syn::Result<Vec<_>>>()?;
        let Self { documents, visibility, name, stored, choice, .. } = self;
        Ok(typed(documents, visibility, name, stored.as_ref(), choice.as_ref(), &parameters))
    }
}

/// True if one of the parameters is memory, which the struct borrows.
pub(super) fn borrow(parameters: &[Parameter]) -> bool {
    parameters.iter().any(|parameter| parameter.kind.is_memory())
}

/// Generates the struct of the parameters and its packing. `stored` is a type parameter that the
/// launch selects. `choice` is a field that is not passed to the kernel.
pub(super) fn typed(
    documents: &[Attribute],
    visibility: &Visibility,
    name: &Ident,
    stored: Option<&Ident>,
    choice: Option<&Field>,
    parameters: &[Parameter],
) -> Tokens {
    let (declared, bounded, named) = match (borrow(parameters), stored) {
        (_, Some(stored)) => (quote!(<'a, #stored>), quote!(<#stored: ::core::fmt::Debug>), quote!(<'_, #stored>)),
        (true, None) => (quote!(<'a>), quote!(), quote!(<'_>)),
        (false, None) => (quote!(), quote!(), quote!()),
    };
    let launch = quote!(::cuda_std::launch);
    let choice = choice.map(|Field { ident, ty, .. }| quote!(#[doc = "Which kernel is launched."] pub #ident: #ty,));
    let fields = parameters.iter().map(|Parameter { name, kind, docs }| {
        let ty = match kind {
            Kind::Slice(element) => quote!(#launch::Slice<'a, #element>),
            Kind::Pointer(element) => quote!(#launch::Pointer<'a, #element>),
            Kind::PointerMut(element) => quote!(#launch::PointerMut<'a, #element>),
            Kind::TensorMap(element) => quote!(#launch::TensorMap<'a, #element>),
            Kind::Value(ty) => quote!(#ty),
        };
        let text = format!("The kernel's parameter `{name}`.");
        quote!(#(#docs)* #[doc = #text] pub #name: #ty)
    });
    let packed = parameters.iter().map(|Parameter { name, .. }| quote!(#launch::Argument::pack(&self.#name, words)));
    let pointers = parameters.iter().filter(|p| p.kind.is_memory()).map(|p| p.name.to_string());
    let text = name.to_string();
    quote! {
        #[cfg(not(target_arch = "nvptx64"))]
        #(#documents)*
        #[allow(non_camel_case_types)]
        #[derive(Debug)]
        #visibility struct #name #declared { #choice #(#fields),* }

        // SAFETY: each field packs itself, and only types of `launch` can: a `Slice` as two words,
        // a `Pointer` as one, a `TensorMap` as eight, and plain data as those that it fills.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl #bounded #launch::Arguments for #name #named {
            const NAME: &'static str = #text;
            const POINTERS: &'static [&'static str] = &[#(#pointers),*];
            fn pack(&self, words: &mut #launch::Words) {
                #(#packed;)*
            }
        }
    }
}
