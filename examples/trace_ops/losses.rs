//! Losses, including the head of a language model.

use crate::case::{Case, Run, both};
use stepscope::{Result, ops};

pub(crate) const CASES: &[&[(&str, Run)]] = &[
    &both!("squared_error", <S>, |c| {
        let shape @ [rows, cols] = c.extents([70, 300]);
        c.longest(rows * cols);
        let (x, target, weight) = (c.operand::<S>("x", shape)?, c.operand("target", shape)?, c.scalar("weight"));
        let (dy, (loss, dx)) = (c.upstream::<S>()?, ops::squared_error(c.step, &x, &target, Some(weight))?);
        c.result("y", &loss)?;
        c.result("dx", &ops::scale_by(c.step, &dx, &dy)?)
    }),
    &both!("binary_cross_entropy", <S>, |c| {
        let shape @ [rows, cols] = c.extents([70, 300]);
        c.longest(rows * cols);
        let (x, target) = (c.operand::<S>("x", shape)?, c.random.borrow_mut().uniforms(rows * cols, 0.0, 1.0));
        let (target, weight, dy) = (c.given("target", shape, &target)?, c.scalar("weight"), c.upstream::<S>()?);
        let (loss, dx) = ops::binary_cross_entropy(c.step, &x, &target, Some(weight))?;
        c.result("y", &loss)?;
        c.result("dx", &ops::scale_by(c.step, &dx, &dy)?)
    }),
    &both!("cross_entropy_by", <S>, |c| {
        let [rows, classes] = c.extents([300, 12]);
        c.longest(rows.max(classes));
        let logits = c.operand::<S>("logits", [rows, classes + 1])?;
        let mut labels = c.belows(rows, classes + 1);
        labels.iter_mut().skip(3).step_by(5).for_each(|label| *label = ops::IGNORED);
        let labels = c.indices("labels", [rows], &labels)?;
        let (weight, smoothing, dy) = (c.scalar("weight"), c.share("smoothing"), c.upstream::<S>()?);
        let rules = ops::LabelRules { smoothing, ignore: true, weight: Some(weight) };
        let (loss, dlogits) = ops::cross_entropy_by(c.step, &logits, &labels, rules)?;
        c.result("y", &loss)?;
        c.result("dlogits", &ops::scale_by(c.step, &dlogits, &dy)?)
    }),
    &both!("cross_entropy", <S>, |c| {
        let [rows, classes] = c.extents([300, 12]);
        c.longest(rows.max(classes));
        let logits = c.operand::<S>("logits", [rows, classes + 1])?;
        let labels = c.indices("labels", [rows], &c.belows(rows, classes + 1))?;
        c.given("weight", [1], &[1.0 / rows as f32])?;
        let (dy, (loss, dlogits)) = (c.upstream::<S>()?, ops::cross_entropy(c.step, &logits, &labels)?);
        c.result("y", &loss)?;
        c.result("dlogits", &ops::scale_by(c.step, &dlogits, &dy)?)
    }),
    &both!("linear_cross_entropy", <S>, |c| {
        let [rows, width, vocabulary] = c.extents([300, 40, 60]);
        let vocabulary = vocabulary + 1;
        // Three successive sums: the logits, their softmax, and the products with its gradients.
        c.longest_product::<S>(width + vocabulary + rows.max(vocabulary));
        // The largest shape has three chunks.
        let (form, shape) = match c.seed % 2 {
            0 => (ops::LmHeadConfig::default(), [width, vocabulary]),
            _ => (ops::LmHeadConfig::default().tied(), [vocabulary, width]),
        };
        c.given("tied", [1], &[u32::from(form.tied)])?;
        let (hidden, w) = (c.operand::<S>("hidden", [rows, width])?, c.operand::<S>("w", shape)?);
        let mut labels = c.belows(rows, vocabulary);
        labels.iter_mut().skip(3).step_by(5).for_each(|label| *label = ops::IGNORED);
        let labels = c.indices("labels", [rows], &labels)?;
        let (weight, smoothing, dy) = (c.scalar("weight"), c.share("smoothing"), c.upstream::<S>()?);
        let rules = ops::LabelRules { smoothing, ignore: true, weight: Some(weight) };
        let form = form.rules(rules).chunk(128);
        let (loss, dhidden, dw) = ops::linear_cross_entropy(c.step, &hidden, &w, &labels, &form)?;
        c.result("y", &loss)?;
        c.result("dhidden", &ops::scale_by(c.step, &dhidden, &dy)?)?;
        c.result("dw", &ops::scale_by(c.step, &dw, &dy)?)
    }),
    &both!("linear_cross_entropy_of_rows", <S>, |c| {
        let [rows, width, vocabulary] = c.extents([300, 40, 60]);
        let vocabulary = vocabulary + 1;
        c.longest_product::<S>(width + vocabulary + rows.max(vocabulary));
        let (form, shape) = match c.seed % 2 {
            0 => (ops::LmHeadConfig::default(), [width, vocabulary]),
            _ => (ops::LmHeadConfig::default().tied(), [vocabulary, width]),
        };
        c.given("tied", [1], &[u32::from(form.tied)])?;
        let (hidden, w) = (c.operand::<S>("hidden", [rows, width])?, c.operand::<S>("w", shape)?);
        let mut labels = c.belows(rows, vocabulary);
        labels.iter_mut().skip(3).step_by(5).for_each(|label| *label = ops::IGNORED);
        let (labels, dy) = (c.indices("labels", [rows], &labels)?, c.operand::<f32>("dy", [rows])?);
        let form = form.chunk(128);
        let losses = ops::linear_cross_entropy_of_rows(c.step, &hidden, &w, &labels, &form)?;
        let (step, wanted) = (c.step, [true; 2]);
        let (dhidden, dw) =
            ops::launch::linear_cross_entropy_of_rows_backward(step, &hidden, &w, &labels, (&dy, &form), wanted)?;
        c.result("y", &losses)?;
        c.result("dhidden", &dhidden.expect("it is wanted"))?;
        c.result("dw", &dw.expect("it is wanted"))
    }),
];
