//! The cell of a long short-term memory.

use crate::error::{Error, Result};
use crate::tape::{AnyVar, Kept, Var};
use crate::tensor::{Source, Stored, Target};
use cuda_std::launch::{PointerMut, Slice};
use kernels::lstm::{lstm_backward, lstm_forward};

impl<'s, S: Stored> Var<'s, S> {
    /// The next state and the output of a long short-term memory, `[c', h]`, from its gates i, f, g
    /// and o before their functions; this: `[.., 4 width]`, `c`, results: `[.., width]`. Without
    /// `c` it is 0.
    ///
    /// ```text
    /// c' = sigmoid(i) tanh(g) + sigmoid(f) c        h = sigmoid(o) tanh(c')
    /// ```
    /// One launch forward, and one backward.
    ///
    /// # Errors
    /// [`Error::Misuse`] for other shapes; [`Error::ArenaFull`].
    #[track_caller]
    pub fn lstm_cell(&self, c: Option<&Self>) -> Result<[Self; 2]> {
        const OP: &str = "lstm_cell";
        let shape = self.shape();
        let columns = shape.extents().last().copied().unwrap_or(0);
        let width = columns / 4;
        let of_cells = shape.with_last(width);
        if width == 0 || columns % 4 != 0 || c.is_some_and(|c| c.shape() != of_cells) {
            let c = c.map_or("no c".to_owned(), |c| format!("c {}", c.shape()));
            return Err(Error::misuse(OP, "gates [.., 4 width] and c [.., width]", format!("{shape} and {c}")));
        }
        let vars: Vec<&dyn AnyVar> = [Some(self), c].into_iter().flatten().map(|var| var as &dyn AnyVar).collect();
        let op = self.op(OP, &vars)?;
        let (mut c_out, mut h) = (op.step().empty(of_cells)?, op.step().empty(of_cells)?);
        op.step().launch(lstm_forward {
            gates: self.value().slice(),
            c: c.map_or_else(Slice::empty, |c| c.value().slice()),
            width,
            c_out: c_out.out(),
            h: h.out(),
        })?;
        let (gates, c, next) = (self.keep(), c.map(Self::keep), c_out.save());
        let kept = Kept::of(&next);
        let outputs = op.record_all(vec![next, h.save()], move |back, gradients| {
            let (gates, c) = (gates.var(back)?, c.map(|c| c.var(back)).transpose()?);
            let (step, next) = (back.step(), kept.value(back));
            let mut dgates = step.empty(gates.shape())?;
            let mut dc = c.map(|c| step.empty(c.shape())).transpose()?;
            let [dc_out, dh] = [0, 1].map(|number| gradients[number].as_ref().map_or_else(Slice::empty, Source::slice));
            step.launch(lstm_backward {
                gates: gates.value().slice(),
                c: c.as_ref().map_or_else(Slice::empty, |c| c.value().slice()),
                c_out: next.slice(),
                dh,
                dc_out,
                width,
                dgates: dgates.out(),
                dc: dc.as_mut().map_or_else(PointerMut::empty, Target::out),
            })?;
            gradients.into_iter().flatten().for_each(|gradient| step.free(gradient));
            back.add(&gates, dgates)?;
            match c.zip(dc) {
                Some((c, dc)) => back.add(&c, dc),
                None => Ok(()),
            }
        });
        outputs.try_into().map_err(|_| unreachable!("two values have two variables"))
    }
}
