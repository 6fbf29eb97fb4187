//! `#[kernel]`: expands one function into a PTX entry point on the GPU, or a function and a typed
//! argument list on the CPU.
//!
//! The attribute takes no arguments, as in rust-cuda, so that the same source compiles with both.
//!
//! Invariant: parameters reach the function in the same order on every device. A slice is a pointer
//! and a length, a tensor map is 128 bytes on a GPU and eight words on a CPU, and plain data fills
//! whole words of 8 bytes. The author must write the word `unsafe`: a module that forbids unsafe
//! code also rejects the unsafe code that these macros generate.

#![warn(clippy::disallowed_methods)]

mod arguments;
mod foreign_math;
mod pointers;

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::{
    Attribute, Error, FnArg, GenericArgument, Ident, ItemFn, Pat, PathArguments, ReturnType, Type, parse_macro_input,
    spanned::Spanned,
};

/// Makes a `pub unsafe fn` a kernel.
///
/// On NVPTX it becomes a PTX entry of the same name, with `&[T]` passed as pointer and length. On a
/// CPU the function remains, and a struct of the same name holds its arguments for a launch. `&[T]`
/// becomes `Slice<'a, T>`, `*const T` becomes `Pointer<'a, T>`, `*mut T` becomes `PointerMut<'a,
/// T>`, and `TensorMap<T>` becomes `launch::TensorMap<'a, T>`. Numbers, arrays of numbers, and
/// structs of numbers that are `repr(C)` and `launch::Pod`, are unchanged. The struct is plain
/// data. The kernel's `Contract` defines its number of threads and the memory that it may access.
///
/// In its body `x.exp()`, `f32::exp(x)` and other functions that only the standard library has are
/// rejected. Use `kernels::math` instead. The functions that a kernel calls are not checked. There
/// the GPU build reports *no method named `exp` found for type `f32`*.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expanded(attribute, parse_macro_input!(item as ItemFn), false)
}

/// Makes a `pub unsafe fn` a kernel of warpgroups: one that uses instructions of `sm_90a`.
///
/// It differs from [`macro@kernel`] in the PTX that contains it. PTX for `sm_90a` contains only
/// kernels of warpgroups, and other PTX contains none. A GPU of compute capability 9.0 loads the
/// PTX of `sm_90` and of `sm_90a`. rust-cuda lacks this macro.
#[proc_macro_attribute]
pub fn warpgroup_kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expanded(attribute, parse_macro_input!(item as ItemFn), true)
}

fn expanded(attribute: TokenStream, item: ItemFn, is_warpgroup: bool) -> TokenStream {
    if !attribute.is_empty() {
        return Error::new(
            item.sig.span(),
            "#[kernel] takes no arguments; block size and shared bytes stand in `contract!`",
        )
        .into_compile_error()
        .into();
    }
    expand(&item, is_warpgroup).unwrap_or_else(Error::into_compile_error).into()
}

/// Expands `written_unsafe!(unsafe)` to an empty unsafe block at the author's `unsafe`. The
/// compiler's lint `unsafe_code` ignores the code that another crate's macro generates. This block
/// has the author's span, so the lint applies.
#[proc_macro]
pub fn written_unsafe(input: TokenStream) -> TokenStream {
    let word = parse_macro_input!(input as syn::Token![unsafe]);
    quote_spanned!(word.span=> #[allow(unused_unsafe)] const _: () = unsafe {};).into()
}

/// Expands to the struct that `#[kernel]` makes of a function with these parameters, for a family
/// of kernels that share them: `arguments! { pub struct matmul { tile: Tile } (a: &[f32], out: *mut
/// f32) }`. The field in braces selects a kernel, and is not passed to it. `struct tanh<S> (x:
/// &[S], y: *mut S)` does the same for a family whose kernels differ in the type S.
#[proc_macro]
pub fn arguments(input: TokenStream) -> TokenStream {
    parse_macro_input!(input as arguments::Family).expand().unwrap_or_else(Error::into_compile_error).into()
}

enum Kind {
    Slice(Type),
    Pointer(Type),
    PointerMut(Type),
    /// A tensor map of elements of this type.
    TensorMap(Type),
    /// Plain data, passed by value.
    Value(Type),
}

impl Kind {
    /// True for memory, which a launch borrows.
    fn is_memory(&self) -> bool {
        !matches!(self, Self::Value(_))
    }
}

struct Parameter {
    name: Ident,
    kind: Kind,
    docs: Vec<Attribute>,
}

fn expand(item: &ItemFn, is_warpgroup: bool) -> syn::Result<Tokens> {
    let signature = &item.sig;
    if !matches!(signature.safety, syn::Safety::Unsafe(_)) {
        return Err(Error::new(
            signature.span(),
            "a kernel must be `unsafe`: its pointers are checked by its contract alone",
        ));
    }
    if signature.constness.is_some() || signature.asyncness.is_some() || signature.abi.is_some() {
        return Err(Error::new(signature.span(), "a kernel is a plain `unsafe fn`: not const, async or extern"));
    }
    if !matches!(signature.output, ReturnType::Default) {
        return Err(Error::new(
            signature.output.span(),
            "a kernel returns nothing: write through a `*mut T` parameter",
        ));
    }
    if !signature.generics.params.is_empty() || signature.generics.where_clause.is_some() {
        return Err(Error::new(signature.generics.span(), "a kernel cannot be generic: its name is its PTX entry"));
    }
    let parameters = signature.inputs.iter().map(parameter).collect::<syn::Result<Vec<_>>>()?;
    // The safety requirement is the same for every kernel, so it is generated once, if the kernel
    // is documented at all.
    let documents: Vec<Attribute> = item.attrs.iter().filter(|a| a.path().is_ident("doc")).cloned().collect();
    let mut item = item.clone();
    if !documents.is_empty() {
        item.attrs.push(
            syn::parse_quote!(#[doc = "\n# Safety\nA launch calls it, with arguments that its contract accepted."]),
        );
        // clippy reads only the sections in the source.
        item.attrs.push(syn::parse_quote!(#[allow(clippy::missing_safety_doc)]));
    }
    let item = &item;
    // Emitted next to the kernel and not in its place, so that a rejected kernel causes no further
    // errors.
    let refused = foreign_math::refuse(item.block.to_token_stream()).err().map(Error::into_compile_error);
    // The macro of `cuda_std` that selects the PTX.
    let entry = if is_warpgroup { quote!(warpgroup_entry) } else { quote!(entry) };
    let gpu = on_gpu(item, &parameters);
    let cpu = on_cpu(item, &documents, &parameters, is_warpgroup);
    Ok(quote! {
        #refused
        #[cfg(target_arch = "nvptx64")]
        ::cuda_std::#entry! { #gpu }
        #cpu
    })
}

fn parameter(argument: &FnArg) -> syn::Result<Parameter> {
    let FnArg::Typed(typed) = argument else {
        return Err(Error::new(argument.span(), "a kernel is a free function"));
    };
    let Pat::Ident(pattern) = &*typed.pat else {
        return Err(Error::new(typed.pat.span(), "a kernel's parameter needs a plain name"));
    };
    let kind = match &*typed.ty {
        Type::Reference(reference) => match &*reference.elem {
            // A named lifetime could outlive the launch.
            Type::Slice(slice) if reference.mutability.is_none() && reference.lifetime.is_none() => {
                Kind::Slice((*slice.elem).clone())
            }
            _ => {
                return Err(Error::new(
                    typed.ty.span(),
                    "a kernel takes `&[T]`, `*const T`, `*mut T` or a scalar; outputs are `*mut T`",
                ));
            }
        },
        Type::Ptr(pointer) if matches!(pointer.mutability, syn::PointerMutability::Mut(_)) => {
            Kind::PointerMut((*pointer.elem).clone())
        }
        Type::Ptr(pointer) => Kind::Pointer((*pointer.elem).clone()),
        other => tensor_map(other).map_or_else(|| Kind::Value(other.clone()), Kind::TensorMap),
    };
    Ok(Parameter { name: pattern.ident.clone(), kind, docs: typed.attrs.clone() })
}

/// Returns T if the type is `TensorMap<T>`.
fn tensor_map(ty: &Type) -> Option<Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last().filter(|last| last.ident == "TensorMap")?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match arguments.args.first() {
        Some(GenericArgument::Type(element)) => Some(element.clone()),
        _ => None,
    }
}

fn on_gpu(item: &ItemFn, parameters: &[Parameter]) -> Tokens {
    let (attributes, visibility, name) = (&item.attrs, &item.vis, &item.sig.ident);
    let (body, inputs) = (&item.block, &item.sig.inputs);
    let flat = parameters.iter().map(|Parameter { name, kind, .. }| match kind {
        Kind::Slice(element) => {
            let length = format_ident!("{name}_len");
            quote!(#name: *const #element, #length: usize)
        }
        Kind::Pointer(element) => quote!(#name: *const #element),
        Kind::PointerMut(element) => quote!(#name: *mut #element),
        Kind::TensorMap(_) => quote!(#name: ::cuda_std::tensor_map::Parameter),
        Kind::Value(ty @ Type::Array(_)) => quote!(#name: ::cuda_std::array::Parameter<#ty>),
        Kind::Value(ty) => quote!(#name: #ty),
    });
    // The number of the next PTX parameter.
    let mut number = 0;
    let arguments = parameters.iter().map(|Parameter { name: parameter, kind, .. }| {
        let own = number;
        number += if matches!(kind, Kind::Slice(_)) { 2 } else { 1 };
        match kind {
            Kind::Slice(_) => {
                let length = format_ident!("{parameter}_len");
                quote!(::core::slice::from_raw_parts(#parameter, #length))
            }
            Kind::TensorMap(_) => {
                // LLVM gives the parameter this name.
                let assembly =
                    format!("{{{{ .reg .b64 %map; mov.b64 %map, {name}_param_{own}; cvta.param.u64 {{0}}, %map; }}}}");
                quote! {{
                    let _ = #parameter;
                    let address: u64;
                    ::core::arch::asm!(
                        #assembly, out(reg64) address, options(pure, nomem, nostack, preserves_flags)
                    );
                    ::cuda_std::tensor_map::TensorMap::at(address)
                }}
            }
            Kind::Value(Type::Array(_)) => quote!(#parameter.0),
            _ => quote!(#parameter),
        }
    });
    quote! {
        #(#attributes)*
        #[unsafe(no_mangle)]
        #visibility unsafe extern "ptx-kernel" fn #name(#(#flat),*) {
            #[inline(always)]
            unsafe fn body(#inputs) #body
            // SAFETY: this is the first statement in the kernel. The host passes a pointer and its
            // length, as the contract has checked.
            unsafe {
                ::cuda_std::grid::begin();
                body(#(#arguments),*)
            }
        }
    }
}

fn on_cpu(item: &ItemFn, documents: &[Attribute], parameters: &[Parameter], is_warpgroup: bool) -> Tokens {
    let (attributes, visibility, name) = (&item.attrs, &item.vis, &item.sig.ident);
    let raw = parameters.iter().filter(|p| matches!(p.kind, Kind::Pointer(_) | Kind::PointerMut(_)));
    let body = pointers::instrumented(&item.block, &raw.map(|p| &p.name).collect::<Vec<_>>());
    let signature = &item.sig;
    let launch = quote!(::cuda_std::launch);
    let typed = arguments::typed(documents, visibility, name, None, None, parameters);
    let elided = if arguments::borrow(parameters) { quote!(<'_>) } else { quote!() };
    // The number of the next word.
    let mut word = quote!(0usize);
    let unpacked = parameters.iter().map(|Parameter { kind, .. }| {
        let (read, words) = match kind {
            Kind::Slice(_) => (quote!(slice), quote!(2)),
            Kind::Pointer(_) => (quote!(pointer), quote!(1)),
            Kind::PointerMut(_) => (quote!(pointer_mut), quote!(1)),
            Kind::TensorMap(_) => (quote!(tensor_map), quote!(8)),
            Kind::Value(ty) => (quote!(value), quote!(#launch::words_of::<#ty>())),
        };
        let read = quote!(#launch::unpack::#read(words, const { #word }));
        word = quote!(#word + #words);
        read
    });
    let unpacked: Vec<Tokens> = unpacked.collect();
    // Outputs are unpacked and looked up once for all consecutive threads of the block. The other
    // arguments stay in the packed words, and need no stack space of a thread that waits.
    let is_output = |parameter: &Parameter| matches!(parameter.kind, Kind::PointerMut(_));
    let output = |at: usize| format_ident!("output{at}");
    let arguments = parameters.iter().zip(&unpacked).enumerate();
    let arguments: Vec<Tokens> = (arguments.clone())
        .map(|(at, (parameter, unpacked))| {
            let output = output(at);
            if is_output(parameter) { quote!(#output) } else { unpacked.clone() }
        })
        .collect();
    let outputs = parameters.iter().zip(&unpacked).enumerate().filter(|(_, (parameter, _))| is_output(parameter));
    let outputs = outputs.map(|(at, (_, unpacked))| {
        let output = output(at);
        quote! {
            // SAFETY: the emulator passes the words that this kernel's `pack` wrote, and reads each
            // argument at the index where `pack` stored it.
            let #output = unsafe { #unpacked };
            ::cuda_std::emulator::access::look_up(#output);
        }
    });
    let threads = quote! {
        #(#outputs)*
        while block.begin() {
            // SAFETY: the emulator passes the words that this kernel's `pack` wrote, for a grid
            // that its contract accepted with them. `Versions` requires that their memory is
            // borrowed for the launch. Each argument is read at the index where `pack` stored it.
            unsafe { #name(#(#arguments),*) }
            block.end();
        }
    };
    // Warpgroups multiply in functions that select the processor's instructions themselves.
    let widest = if is_warpgroup { quote!(fused) } else { quote!(wide) };
    let wide = (!is_warpgroup).then(|| {
        quote! {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512dq,avx512bw,avx512vl")]
            unsafe fn wide(words: *const u64, block: &::cuda_std::emulator::Block) {
                // SAFETY: this is `Versions::wide`, which runs only without race detection.
                unsafe { ::cuda_std::emulator::access::assume_watched(false) };
                #threads
            }
        }
    });
    quote! {
        #[cfg(not(target_arch = "nvptx64"))]
        #(#attributes)*
        #[inline(always)]
        #visibility #signature #body

        #typed

        #[cfg(not(target_arch = "nvptx64"))]
        const _: () = {
            // Compiled two or three times for x86-64, and twice elsewhere. A fused multiply-add is
            // one instruction if the processor has it, otherwise a call. Vectors are as wide as the
            // processor's. Race detection is compiled in or out.
            #[cfg(any(target_arch = "x86_64", miri))]
            unsafe fn portable(words: *const u64, block: &::cuda_std::emulator::Block) {
                #threads
            }
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
            unsafe fn fused(words: *const u64, block: &::cuda_std::emulator::Block) {
                // SAFETY: this is `Versions::fused`, which runs only without race detection.
                unsafe { ::cuda_std::emulator::access::assume_watched(false) };
                #threads
            }
            #wide
            #[cfg(not(target_arch = "x86_64"))]
            unsafe fn watched(words: *const u64, block: &::cuda_std::emulator::Block) {
                // SAFETY: this is `Versions::watched`, which runs only with race detection.
                unsafe { ::cuda_std::emulator::access::assume_watched(true) };
                #threads
            }

            // SAFETY: `threads` reads the words in the order and at the indices of the parameters,
            // as `pack` writes them.
            unsafe impl #launch::Kernel for #name #elided {
                const VERSIONS: #launch::Versions = #launch::Versions {
                    #[cfg(any(target_arch = "x86_64", miri))]
                    portable,
                    fused,
                    #[cfg(target_arch = "x86_64")]
                    wide: #widest,
                    #[cfg(not(target_arch = "x86_64"))]
                    watched,
                };
                const IS_WARPGROUP: bool = #is_warpgroup;
            }
        };
    }
}
