//! The tensors of a file, and the parameters that hold their elements.
//!
//! A parameter is a matrix of `[inputs, outputs]`, as in [`Linear`](stepscope_train::nn::Linear),
//! or a vector of `[outputs]`. A tensor of a file holds some outputs of one or more parameters:
//!
//! ```text
//! q_proj.weight        [q outputs, width]      attention.qkv_proj.weight  [width, q | k | v]
//! k_proj.weight        [k outputs, width]      the columns after q's
//! gate_up_proj.weight  [2 hidden, width]       mlp.gate_proj.weight, mlp.up_proj.weight
//! query_key_value      [heads (q, k, v), width]   q's, k's and v's columns of each head in turn
//! experts.3.up_proj    [hidden, width]         mlp.up.weight  [width, experts * hidden], expert 3's
//! ```
//! Invariant: each element of each parameter has exactly one place in exactly one tensor.

use crate::config::{Family, FeedForwardKind, MixtureConfig, ModelConfig, NormKind, QkNormKind, Residual};
use std::collections::BTreeMap;
use stepscope_core::Stored;
use stepscope_core::internals::{Columns, copy, transpose};

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(crate) struct FileTensor {
    /// The name.
    pub(crate) name: String,
    /// The shape in the file.
    pub(crate) shape: Vec<usize>,
    /// The inputs of each output, 1 for a vector.
    pub(crate) inputs: usize,
    /// True if the inputs of an output are adjacent in the file.
    pub(crate) transposed: bool,
    /// The part of a model that the tensor belongs to.
    pub(crate) kind: TensorKind,
    /// The number that is added to the file's value.
    pub(crate) added: f32,
    /// The parts, in the order of the file's outputs.
    pub(crate) parts: Vec<OutputRange>,
}

/// The part of a model that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorKind {
    /// The weight of a linear layer, to which an adapter may be added.
    Linear,
    /// A matrix of an expert.
    Expert,
    /// The router of a mixture.
    Router,
    /// A table or a vector.
    Other,
}

/// Adjacent outputs of a parameter that are adjacent in a file's tensor too.
#[derive(Clone, Debug)]
pub(crate) struct OutputRange {
    /// The parameter's name.
    pub(crate) parameter: String,
    /// The parameter's first output.
    pub(crate) first: usize,
    /// The number of outputs.
    pub(crate) outputs: usize,
}

impl FileTensor {
    /// Returns the name in the file of a model that was saved without its head, which lacks the
    /// first part.
    pub(crate) fn bare_name(&self) -> &str {
        self.name.split_once('.').map_or("", |(_, rest)| rest)
    }

    /// Returns the name of the module that the tensor belongs to.
    pub(crate) fn module(&self) -> &str {
        self.name.rsplit_once('.').map_or(&self.name, |(module, _)| module)
    }

    /// Returns true for the table of tokens.
    pub(crate) fn is_token_table(&self) -> bool {
        self.parts.first().is_some_and(|part| part.parameter == "tokens.weight")
    }

    /// Returns true for a matrix by which tokens are multiplied, which a file may have in NF4.
    pub(crate) fn is_matrix(&self) -> bool {
        self.kind != TensorKind::Other
    }

    /// Returns the number of outputs in the file.
    pub(crate) fn outputs(&self) -> usize {
        self.parts.iter().map(|part| part.outputs).sum()
    }

    /// Returns true if the tensor is the whole parameter of so many outputs, in its order.
    pub(crate) fn is_stored_as(&self, outputs: usize) -> bool {
        !self.transposed && self.added == 0.0 && self.parts.len() == 1 && self.parts[0].outputs == outputs
    }

    /// Returns for each part its parameter, and the places of its elements. `columns` returns a
    /// parameter's outputs.
    pub(crate) fn places<'t>(
        &'t self,
        columns: impl Fn(&str) -> usize + 't,
    ) -> impl Iterator<Item = (&'t str, Places)> {
        let (all, inputs, transposed) = (self.outputs(), self.inputs, self.transposed);
        let mut next = 0;
        self.parts.iter().map(move |part| {
            let OutputRange { ref parameter, first, outputs } = *part;
            let (start, columns) = (next, columns(parameter));
            next += outputs;
            (&**parameter, Places { inputs, outputs, first, columns, start, all, transposed })
        })
    }
}

/// The places of a part's elements in its parameter, and in the file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    inputs: usize,
    outputs: usize,
    /// The first output in the parameter, and all outputs of the parameter.
    first: usize,
    columns: usize,
    /// The first output in the file, and all outputs in the file.
    start: usize,
    all: usize,
    transposed: bool,
}

impl Places {
    /// The inputs and outputs that are visited together, so that both sides stay in the cache.
    const BLOCK: usize = 64;

    /// Copies the part's elements of a file's tensor to its parameter.
    pub(crate) fn copy<S: Stored>(self, theirs: &[S], ours: &mut [S], added: f32) {
        let Self { inputs, outputs, first, columns, start, all, transposed } = self;
        let place = Columns { first, of: columns };
        match transposed {
            _ if added != 0.0 => self.for_each(|at, there| ours[at] = S::narrow(theirs[there].widen() + added)),
            true => {
                let source = (&theirs[start * inputs..], Columns { first: 0, of: inputs });
                transpose(source, (ours, place), outputs);
            }
            false => copy((theirs, Columns { first: start, of: all }), (ours, place), outputs),
        }
    }

    /// Calls `visit` with each element's index in the parameter and in the file.
    pub(crate) fn for_each(self, mut visit: impl FnMut(usize, usize)) {
        let Self { inputs, outputs, first, columns, start, all, transposed } = self;
        for (input, output) in blocks(inputs).flat_map(|input| blocks(outputs).map(move |output| (input, output))) {
            for input in input..inputs.min(input + Self::BLOCK) {
                for output in output..outputs.min(output + Self::BLOCK) {
                    let there = match transposed {
                        true => (start + output) * inputs + input,
                        false => input * all + start + output,
                    };
                    visit(input * columns + first + output, there);
                }
            }
        }
    }
}

/// Returns the starts of blocks.
fn blocks(count: usize) -> impl Iterator<Item = usize> {
    (0..count).step_by(Places::BLOCK)
}

/// The names of one family.
struct Names {
    tensors: Vec<FileTensor>,
    /// True if matrices are stored as `[outputs, inputs]`.
    transposed: bool,
    /// The number that gains have in addition to the file's value.
    gain: f32,
    norm: NormKind,
}

impl Names {
    /// Adds a tensor that is stored as the parameter is.
    fn table(&mut self, name: impl Into<String>, parameter: &str, [rows, columns]: [usize; 2]) {
        let parts = vec![OutputRange { parameter: parameter.into(), first: 0, outputs: columns }];
        let shape = vec![rows, columns];
        let (inputs, name) = (rows, name.into());
        self.tensors.push(FileTensor {
            name,
            shape,
            inputs,
            transposed: false,
            kind: TensorKind::Other,
            added: 0.0,
            parts,
        });
    }

    fn vector(&mut self, name: String, added: f32, parts: Vec<OutputRange>) {
        let shape = vec![parts.iter().map(|part| part.outputs).sum()];
        self.tensors.push(FileTensor {
            name,
            shape,
            inputs: 1,
            transposed: false,
            kind: TensorKind::Other,
            added,
            parts,
        });
    }

    /// Adds a norm.
    fn norm(&mut self, name: &str, parameter: &str, width: usize) {
        let part = |kind| vec![OutputRange { parameter: format!("{parameter}.{kind}"), first: 0, outputs: width }];
        self.vector(format!("{name}.weight"), self.gain, part("gain"));
        if self.norm == NormKind::Layer {
            self.vector(format!("{name}.bias"), 0.0, part("bias"));
        }
    }

    /// Adds a linear layer whose outputs are these parts of layers.
    fn linear(&mut self, name: &str, bias: bool, inputs: usize, parts: &[(&str, usize, usize)]) {
        let of = |kind: &str| -> Vec<OutputRange> {
            let part = |&(layer, first, outputs): &(&str, usize, usize)| OutputRange {
                parameter: format!("{layer}.{kind}"),
                first,
                outputs,
            };
            parts.iter().map(part).collect()
        };
        let outputs = parts.iter().map(|part| part.2).sum();
        let shape = if self.transposed { vec![outputs, inputs] } else { vec![inputs, outputs] };
        let (name, transposed) = (name.to_owned(), self.transposed);
        self.tensors.push(FileTensor {
            name: format!("{name}.weight"),
            shape,
            inputs,
            transposed,
            kind: TensorKind::Linear,
            added: 0.0,
            parts: of("weight"),
        });
        if bias {
            self.vector(format!("{name}.bias"), 0.0, of("bias"));
        }
    }

    /// Adds a mixture of experts, whose parameters begin with `ours`.
    fn mixture(&mut self, family: Family, [file, ours]: [&str; 2], width: usize, mixture: MixtureConfig) {
        let MixtureConfig { experts, hidden, .. } = mixture;
        let (folder, names) = match family {
            Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let mut add = |name: &str, kind, inputs, part: &(&str, usize, usize)| {
            self.linear(name, false, inputs, &[*part]);
            self.tensors.last_mut().expect("the matrix was added above").kind = kind;
        };
        add(&format!("{file}.{folder}.gate"), TensorKind::Router, width, &(&format!("{ours}.router"), 0, experts));
        let parts = [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)];
        for (expert, (name, (part, inputs, outputs))) in
            (0..experts).flat_map(|expert| names.into_iter().zip(parts).map(move |pair| (expert, pair)))
        {
            let name = format!("{file}.{folder}.experts.{expert}.{name}");
            add(&name, TensorKind::Expert, inputs, &(&format!("{ours}.{part}"), expert * outputs, outputs));
        }
    }
}

/// Returns the tensors of a model's file. The head is missing if it is tied.
pub(crate) fn tensors(config: &ModelConfig) -> Vec<FileTensor> {
    let ModelConfig { family, vocabulary, width, heads, kv_heads, head_width, hidden, norm, .. } = *config;
    let gain = if family == Family::Gemma3 { 1.0 } else { 0.0 };
    let mut names = Names { tensors: Vec::new(), transposed: family != Family::Gpt2, gain, norm };
    let (before, tokens, last, layers) = match family {
        Family::Gpt2 => ("transformer", "wte", "ln_f", "h"),
        Family::GptNeoX => ("gpt_neox", "embed_in", "final_layer_norm", "layers"),
        _ => ("model", "embed_tokens", "norm", "layers"),
    };
    names.table(format!("{before}.{tokens}.weight"), "tokens.weight", [vocabulary, width]);
    if let Some(rows) = config.learned_positions {
        names.table(format!("{before}.wpe.weight"), "positions.weight", [rows, width]);
    }
    let (q, k) = (heads * head_width, kv_heads * head_width);
    for layer in 0..config.layers.len() {
        let (file, ours) = (format!("{before}.{layers}.{layer}"), format!("blocks.{layer}"));
        let ours_of = |name: &str| format!("{ours}.{name}");
        let norms: &[&str] = match (family, config.residual) {
            (Family::Gpt2, _) => &["ln_1", "ln_2"],
            (_, Residual::Sandwich) => &[
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
            (_, Residual::PostNorm) => &["post_attention_layernorm", "post_feedforward_layernorm"],
            _ => &["input_layernorm", "post_attention_layernorm"],
        };
        for (number, name) in norms.iter().enumerate() {
            names.norm(&format!("{file}.{name}"), &ours_of(&format!("norm{}", number + 1)), width);
        }
        let qkv = ours_of("attention.qkv_proj");
        match family {
            Family::Gpt2 => names.linear(&format!("{file}.attn.c_attn"), true, width, &[(&qkv, 0, q + 2 * k)]),
            Family::Phi3 => names.linear(&format!("{file}.self_attn.qkv_proj"), false, width, &[(&qkv, 0, q + 2 * k)]),
            Family::GptNeoX => {
                let part = |number: usize| (&*qkv, number % 3 * q + number / 3 * head_width, head_width);
                let parts: Vec<_> = (0..3 * heads).map(part).collect();
                names.linear(&format!("{file}.attention.query_key_value"), config.qkv_bias, width, &parts);
            }
            _ => {
                for (name, first, outputs) in [("q_proj", 0, q), ("k_proj", q, k), ("v_proj", q + k, k)] {
                    names.linear(
                        &format!("{file}.self_attn.{name}"),
                        config.qkv_bias,
                        width,
                        &[(&qkv, first, outputs)],
                    );
                }
            }
        }
        let output = match family {
            Family::Gpt2 => "attn.c_proj",
            Family::GptNeoX => "attention.dense",
            _ => "self_attn.o_proj",
        };
        names.linear(&format!("{file}.{output}"), config.output_bias, q, &[(&ours_of("attention.o_proj"), 0, width)]);
        if let Some(kind) = config.qk_norm {
            for (name, columns) in [("q_norm", q), ("k_norm", k)] {
                let parameter = ours_of(&format!("attention.{name}.gain"));
                let outputs = if kind == QkNormKind::Heads { head_width } else { columns };
                let part = vec![OutputRange { parameter, first: 0, outputs }];
                names.vector(format!("{file}.self_attn.{name}.weight"), gain, part);
            }
        }
        if let Some(mixture) = config.layers[layer].mixture {
            names.mixture(family, [&file, &ours_of("mlp")], width, mixture);
            continue;
        }
        let bias = config.feed_forward_bias;
        match config.feed_forward {
            FeedForwardKind::Gelu | FeedForwardKind::GeluExact | FeedForwardKind::ReluSquared => {
                let [up, down] = match family {
                    Family::Gpt2 => ["mlp.c_fc", "mlp.c_proj"],
                    Family::Arcee => ["mlp.up_proj", "mlp.down_proj"],
                    _ => ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
                };
                names.linear(&format!("{file}.{up}"), bias, width, &[(&ours_of("mlp.up"), 0, hidden)]);
                names.linear(&format!("{file}.{down}"), bias, hidden, &[(&ours_of("mlp.down"), 0, width)]);
            }
            FeedForwardKind::SwiGlu | FeedForwardKind::GeGlu => {
                let [gate, up] = ["mlp.gate_proj", "mlp.up_proj"].map(ours_of);
                match family {
                    Family::Phi3 => {
                        names.linear(
                            &format!("{file}.mlp.gate_up_proj"),
                            bias,
                            width,
                            &[(&gate, 0, hidden), (&up, 0, hidden)],
                        );
                    }
                    _ => {
                        names.linear(&format!("{file}.mlp.gate_proj"), bias, width, &[(&gate, 0, hidden)]);
                        names.linear(&format!("{file}.mlp.up_proj"), bias, width, &[(&up, 0, hidden)]);
                    }
                }
                names.linear(&format!("{file}.mlp.down_proj"), bias, hidden, &[(&ours_of("mlp.down_proj"), 0, width)]);
            }
        }
    }
    names.norm(&format!("{before}.{last}"), "norm", width);
    if !config.tied {
        names.table(head(family), "head.weight", [vocabulary, width]);
    }
    names.tensors
}

/// Returns for each matrix of a linear layer the outputs of the file's tensors that it consists of.
/// `None` is for a matrix that shares a tensor with another one, and for one whose outputs have
/// another order in the file.
pub(crate) fn matrices(tensors: &[FileTensor]) -> BTreeMap<&str, Option<Vec<usize>>> {
    let mut matrices: BTreeMap<&str, Option<Vec<usize>>> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.is_matrix()) {
        for part in &tensor.parts {
            let outputs = matrices.entry(&part.parameter).or_insert_with(|| Some(Vec::new()));
            match outputs {
                Some(before) if tensor.parts.len() == 1 && before.iter().sum::<usize>() == part.first => {
                    before.push(part.outputs);
                }
                _ => *outputs = None,
            }
        }
    }
    matrices
}

/// Returns the head's name in a file.
pub(crate) fn head(family: Family) -> &'static str {
    if family == Family::GptNeoX { "embed_out.weight" } else { "lm_head.weight" }
}

/// Returns true for masks and frequencies that older files store next to the weights. They are
/// computed again.
pub(crate) fn is_computed(name: &str) -> bool {
    let computed =
        [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"];
    computed.iter().any(|end| name.ends_with(end))
}
