//! `loss.svg`: training and validation loss of every epoch, fold beside fold.
//!
//! Text is written as SVG text, so drawing needs no font; the dashed line is the loss of guessing all classes alike.

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::dataset::CLASSES;
use crate::report::EpochResult;

const SIZE: (u32, u32) = (960, 480);
const LEGEND_WIDTH: u32 = 190;
const TRAIN: RGBColor = RGBColor(0, 114, 178);
const VALID: RGBColor = RGBColor(213, 94, 0);
const QUIET: RGBColor = RGBColor(120, 120, 120);
const FAINT: RGBColor = RGBColor(225, 225, 225);
/// At most so many epochs have their number below the axis.
const NUMBERS: usize = 24;
/// With more epochs the dots are smaller.
const LARGE_DOTS: usize = 60;

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// The picture as SVG text. Losses that are not finite leave a gap.
///
/// # Panics
/// Never for a report's epochs: writing into a string cannot fail.
pub(crate) fn draw(epochs: &[EpochResult]) -> String {
    let mut svg = String::new();
    draw_into(&mut svg, epochs).expect("drawing into a string does not fail");
    svg
}

fn draw_into(svg: &mut String, epochs: &[EpochResult]) -> Drawn {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, legend) = root.split_horizontally(SIZE.0 - LEGEND_WIDTH);
    let chance = (CLASSES as f64).ln();
    let (bottom, top) = loss_range(epochs, chance);
    let right = epochs.len().max(1) as f64 - 0.5;
    let mut chart = ChartBuilder::on(&left)
        .caption("Loss by epoch and fold", ("sans-serif", 20).into_font().color(&BLACK))
        .margin(16)
        .x_label_area_size(72)
        .y_label_area_size(64)
        .build_cartesian_2d(-0.5..right, bottom..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .x_desc("epoch")
        .y_desc("mean cross-entropy")
        .y_labels(8)
        .y_label_formatter(&|loss| format!("{loss:.2}"))
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15))
        .bold_line_style(FAINT)
        .light_line_style(TRANSPARENT)
        .axis_style(QUIET)
        .draw()?;

    chart.draw_series(DashedLineSeries::new([(-0.5, chance), (right, chance)], 6, 5, QUIET.stroke_width(1)))?;
    draw_folds(&mut chart, epochs, bottom, top)?;
    draw_losses(&mut chart, epochs, TRAIN, |epoch| epoch.train_loss)?;
    draw_losses(&mut chart, epochs, VALID, |epoch| epoch.valid_loss)?;
    draw_legend(&legend, chance)?;
    root.present()?;
    Ok(())
}

/// From below the least to above the greatest of all losses and the loss of guessing.
fn loss_range(epochs: &[EpochResult], chance: f64) -> (f64, f64) {
    let losses = epochs.iter().flat_map(|epoch| [epoch.train_loss, epoch.valid_loss]);
    let (least, most) = losses
        .filter(|loss| loss.is_finite())
        .fold((chance, chance), |(least, most), loss| (least.min(loss), most.max(loss)));
    let margin = 0.08 * (most - least).max(0.05);
    (least - margin, most + margin)
}

/// Epochs `start..end` that belong to one fold.
fn runs(epochs: &[EpochResult]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut start = 0;
    epochs.chunk_by(|one, next| one.fold == next.fold).map(move |run| {
        start += run.len();
        start - run.len()..start
    })
}

/// Below the axis the number of each epoch and the name of each fold, and lines between the folds.
fn draw_folds(chart: &mut Chart<'_>, epochs: &[EpochResult], bottom: f64, top: f64) -> Drawn {
    let below = Pos::new(HPos::Center, VPos::Top);
    let text = |text: String, at: f64, pixels_down: i32| {
        let style = ("sans-serif", 14).into_font().color(&BLACK).pos(below);
        EmptyElement::at((at, bottom)) + Text::new(text, (0, pixels_down), style)
    };
    let step = epochs.len().div_ceil(NUMBERS).max(1);
    for run in runs(epochs) {
        let middle = (run.start + run.end - 1) as f64 / 2.0;
        let name = text(format!("fold {}", epochs[run.start].fold), middle, 28);
        let shown = run.clone().step_by(step);
        let numbers = shown.map(|at| text(epochs[at].epoch.to_string(), at as f64, 8));
        chart.draw_series(std::iter::once(name).chain(numbers))?;
        if run.start > 0 {
            let x = run.start as f64 - 0.5;
            chart.draw_series([PathElement::new([(x, bottom), (x, top)], QUIET.stroke_width(1))])?;
        }
    }
    Ok(())
}

/// One dot for each epoch, joined within a fold.
fn draw_losses(
    chart: &mut Chart<'_>,
    epochs: &[EpochResult],
    color: RGBColor,
    loss: impl Fn(&EpochResult) -> f64,
) -> Drawn {
    let radius = if epochs.len() > LARGE_DOTS { 2 } else { 4 };
    for run in runs(epochs) {
        let points: Vec<(f64, f64)> = run.map(|at| (at as f64, loss(&epochs[at]))).collect();
        for part in points.split(|(_, loss)| !loss.is_finite()) {
            chart.draw_series(LineSeries::new(part.iter().copied(), color.stroke_width(2)))?;
            chart.draw_series(part.iter().map(|&point| Circle::new(point, radius, color.filled())))?;
        }
    }
    Ok(())
}

/// Beside the chart, so that it hides no loss.
fn draw_legend(area: &DrawingArea<SVGBackend<'_>, Shift>, chance: f64) -> Drawn {
    let text = ("sans-serif", 14).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    let guessing = format!("guessing: ln {CLASSES} = {chance:.3}");
    for (y, name, color) in [(60, "training", Some(TRAIN)), (82, "validation", Some(VALID)), (104, &guessing, None)] {
        match color {
            Some(color) => {
                area.draw(&PathElement::new([(0, y), (24, y)], color.stroke_width(2)))?;
                area.draw(&Circle::new((12, y), 4, color.filled()))?;
            }
            None => {
                for x in [0, 9, 18] {
                    area.draw(&PathElement::new([(x, y), (x + 6, y)], QUIET.stroke_width(1)))?;
                }
            }
        }
        area.draw(&Text::new(name.to_owned(), (32, y), text.clone()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epochs(folds: usize, count: usize) -> Vec<EpochResult> {
        let result = |fold, epoch: usize| EpochResult {
            fold,
            epoch,
            train_loss: 1.1 / (1.0 + 0.2 * epoch as f64),
            valid_loss: 1.12 / (1.0 + 0.1 * epoch as f64) + 0.05 * fold as f64,
            valid_accuracy: 0.5,
            baseline_accuracy: 0.3,
            seconds: 1.0,
            samples_per_second: 1.0,
        };
        (0..folds).flat_map(|fold| (0..count).map(move |epoch| result(fold, epoch))).collect()
    }

    #[test]
    fn draws_a_dot_for_every_loss() {
        for (folds, count) in [(1, 1), (2, 1), (2, 2), (3, 40)] {
            let svg = draw(&epochs(folds, count));
            let dots = svg.matches("<circle").count();
            assert_eq!(dots, 2 * folds * count + 2, "{folds} folds of {count} epochs, and the legend");
            assert!(svg.contains("fold 0") && svg.contains("training") && svg.contains("validation"));
        }
    }

    #[test]
    fn no_epoch_and_no_finite_loss_are_drawn_too() {
        let mut lost = epochs(1, 3);
        lost[1].train_loss = f64::NAN;
        lost[2].train_loss = f64::INFINITY;
        assert_eq!(draw(&lost).matches("<circle").count(), 1 + 3 + 2);
        assert_eq!(draw(&[]).matches("<circle").count(), 2);
    }
}
