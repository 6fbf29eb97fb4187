//! `loss.svg`: training and validation loss, part beside part of a run.
//!
//! Text is written as SVG text, so drawing needs no font; the dashed line is the loss of guessing all classes alike. Where single losses are too many to follow
//! they are faint, and a line shows the mean of the last few.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const SIZE: (u32, u32) = (960, 480);
const LEGEND_WIDTH: u32 = 190;
const TRAIN: RGBColor = RGBColor(0, 114, 178);
const VALID: RGBColor = RGBColor(213, 94, 0);
const QUIET: RGBColor = RGBColor(120, 120, 120);
const FAINT: RGBColor = RGBColor(225, 225, 225);
/// More losses in a part are smoothed, over this share of them.
const MOST_DOTS: usize = 60;
const SMOOTHED_SHARE: usize = 20;

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// What is drawn.
pub(crate) struct Picture {
    /// What stands above.
    pub(crate) caption: &'static str,
    /// What stands below.
    pub(crate) x_label: &'static str,
    /// Guessing one of so many alike is the dashed line.
    pub(crate) classes: usize,
    /// From left to right, each where the one before it ends.
    pub(crate) parts: Vec<Part>,
}

/// A part of a run, between lines.
pub(crate) struct Part {
    /// What stands below it, if anything.
    pub(crate) name: String,
    /// Where it stands along the axis.
    pub(crate) range: Range<f64>,
    /// What is written below the axis, and where.
    pub(crate) ticks: Vec<(f64, String)>,
    /// The training losses and the validation losses, each at its place along the axis.
    pub(crate) curves: [Vec<(f64, f64)>; 2],
}

impl Picture {
    /// The picture as SVG text. Losses that are not finite leave a gap.
    ///
    /// # Panics
    /// Never: writing into a string cannot fail.
    pub(crate) fn draw(&self) -> String {
        let mut svg = String::new();
        self.draw_into(&mut svg).expect("drawing into a string does not fail");
        svg
    }

    fn draw_into(&self, svg: &mut String) -> Drawn {
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, legend) = root.split_horizontally(SIZE.0 - LEGEND_WIDTH);
        let chance = (self.classes as f64).ln();
        let y = self.losses(chance);
        let x = match &*self.parts {
            [first, .., last] => first.range.start..last.range.end,
            [only] => only.range.clone(),
            [] => -0.5..0.5,
        };
        let mut chart = ChartBuilder::on(&left)
            .caption(self.caption, ("sans-serif", 20).into_font().color(&BLACK))
            .margin(16)
            .x_label_area_size(72)
            .y_label_area_size(64)
            .build_cartesian_2d(x.clone(), y.clone())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .x_desc(self.x_label)
            .y_desc("mean cross-entropy")
            .y_labels(8)
            .y_label_formatter(&|loss| format!("{loss:.2}"))
            .label_style(("sans-serif", 14))
            .axis_desc_style(("sans-serif", 15))
            .bold_line_style(FAINT)
            .light_line_style(TRANSPARENT)
            .axis_style(QUIET)
            .draw()?;

        chart.draw_series(DashedLineSeries::new([(x.start, chance), (x.end, chance)], 6, 5, QUIET.stroke_width(1)))?;
        let most = self.parts.iter().map(|part| part.curves[0].len()).max().unwrap_or(0);
        let window = (most > MOST_DOTS).then_some(most / SMOOTHED_SHARE);
        for (number, part) in self.parts.iter().enumerate() {
            draw_axis(&mut chart, part, y.start)?;
            if number > 0 {
                let x = part.range.start;
                chart.draw_series([PathElement::new([(x, y.start), (x, y.end)], QUIET.stroke_width(1))])?;
            }
        }
        for (color, curve, window) in [(TRAIN, 0, window), (VALID, 1, None)] {
            for part in &self.parts {
                draw_losses(&mut chart, &part.curves[curve], color, window)?;
            }
        }
        draw_legend(&legend, self.classes, window)?;
        root.present()?;
        Ok(())
    }

    /// From below the least to above the greatest of all losses and the loss of guessing.
    fn losses(&self, chance: f64) -> Range<f64> {
        let losses = self.parts.iter().flat_map(|part| part.curves.iter().flatten());
        let (least, most) = losses
            .map(|&(_, loss)| loss)
            .filter(|loss| loss.is_finite())
            .fold((chance, chance), |(least, most), loss| (least.min(loss), most.max(loss)));
        let margin = 0.08 * (most - least).max(0.05);
        least - margin..most + margin
    }
}

/// Below the axis the ticks of a part, and its name.
fn draw_axis(chart: &mut Chart<'_>, part: &Part, bottom: f64) -> Drawn {
    let below = Pos::new(HPos::Center, VPos::Top);
    let text = |text: String, at: f64, pixels_down: i32| {
        let style = ("sans-serif", 14).into_font().color(&BLACK).pos(below);
        EmptyElement::at((at, bottom)) + Text::new(text, (0, pixels_down), style)
    };
    let middle = (part.range.start + part.range.end) / 2.0;
    let ticks = part.ticks.iter().map(|(at, name)| text(name.clone(), *at, 8));
    chart.draw_series(std::iter::once(text(part.name.clone(), middle, 28)).chain(ticks))?;
    Ok(())
}

/// One dot for each loss, joined where they are finite; or, of so many, the mean of the last ones.
fn draw_losses(chart: &mut Chart<'_>, points: &[(f64, f64)], color: RGBColor, window: Option<usize>) -> Drawn {
    for part in points.split(|(_, loss)| !loss.is_finite()) {
        let Some(window) = window else {
            chart.draw_series(LineSeries::new(part.iter().copied(), color.stroke_width(2)))?;
            chart.draw_series(part.iter().map(|&point| Circle::new(point, 4, color.filled())))?;
            continue;
        };
        chart.draw_series(LineSeries::new(part.iter().copied(), color.mix(0.3).stroke_width(1)))?;
        chart.draw_series(LineSeries::new(trailing_means(part, window), color.stroke_width(2)))?;
    }
    Ok(())
}

/// At each place the mean of its loss and of those before it, `window` in all where there are so many.
fn trailing_means(points: &[(f64, f64)], window: usize) -> Vec<(f64, f64)> {
    let last = |end: usize| &points[end.saturating_sub(window)..end];
    let mean = |losses: &[(f64, f64)]| losses.iter().map(|(_, loss)| loss).sum::<f64>() / losses.len() as f64;
    points.iter().zip(1..).map(|(&(x, _), end)| (x, mean(last(end)))).collect()
}

/// Beside the chart, so that it hides no loss.
fn draw_legend(area: &DrawingArea<SVGBackend<'_>, Shift>, classes: usize, window: Option<usize>) -> Drawn {
    let text = ("sans-serif", 14).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    let training = window.map_or("training".into(), |window| format!("training, mean of {window}"));
    let guessing = format!("guessing: ln {classes} = {:.3}", (classes as f64).ln());
    for (y, name, color) in [(60, &*training, Some(TRAIN)), (82, "validation", Some(VALID)), (104, &guessing, None)] {
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

    fn picture(losses: usize) -> String {
        let training = (0..losses).map(|at| (at as f64, if at % 2 == 0 { 1.0 } else { 3.0 })).collect();
        let part = Part {
            name: "a".into(),
            range: 0.0..losses as f64,
            ticks: Vec::new(),
            curves: [training, vec![(1.0, 2.0)]],
        };
        Picture { caption: "c", x_label: "x", classes: 3, parts: vec![part] }.draw()
    }

    #[test]
    fn many_losses_are_smoothed_and_few_are_dots() {
        let (few, many) = (picture(10), picture(200));
        assert!(few.contains(">\ntraining\n<") && few.matches("<circle").count() == 10 + 1 + 2, "{few}");
        assert!(many.contains(">\ntraining, mean of 10\n<") && many.matches("<circle").count() == 1 + 2, "{many}");
        assert!(many.contains("opacity=\"0.3\""), "{many}");
    }

    #[test]
    fn means_are_of_the_last_ones() {
        let points = [(0.0, 4.0), (1.0, 2.0), (2.0, 0.0), (3.0, 10.0)];
        assert_eq!(trailing_means(&points, 2), [(0.0, 4.0), (1.0, 3.0), (2.0, 1.0), (3.0, 5.0)]);
        assert_eq!(trailing_means(&[], 3), []);
    }
}
