//! `loss.svg`: training and validation loss, with the parts of a run side by side.
//!
//! Text is written as SVG text, so drawing needs no font. The dashed line is the loss of a uniform
//! guess over all classes. When there are too many losses to follow, they are faint, and a line
//! shows their moving mean.
//!
//! Invariant: the file stays small however long a run is.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::marks::AXIS;

const SIZE: (u32, u32) = (960, 480);
const LEGEND_WIDTH: u32 = 190;
const TRAIN: RGBColor = RGBColor(0, 114, 178);
const VALID: RGBColor = RGBColor(213, 94, 0);
const QUIET: RGBColor = RGBColor(120, 120, 120);
const FAINT: RGBColor = RGBColor(225, 225, 225);
/// A part with more losses than this is smoothed over one in `SMOOTHED_SHARE` of them.
const MOST_DOTS: usize = 60;
const SMOOTHED_SHARE: usize = 20;
/// The most points of a smoothed line per averaging window, so that a line has about 500 points.
const POINTS_IN_A_MEAN: usize = 25;

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// The contents of the picture.
pub struct Picture {
    /// The title above the chart.
    pub caption: &'static str,
    /// The label below the axis.
    pub x_label: &'static str,
    /// The number of classes, which sets the dashed line.
    pub classes: usize,
    /// The parts from left to right. Each begins where the previous one ends.
    pub parts: Vec<Part>,
}

/// A part of a run, drawn between vertical lines.
pub struct Part {
    /// The name below the part, if any.
    pub name: String,
    /// The part's range along the axis.
    pub range: Range<f64>,
    /// The positions and texts of the axis labels.
    pub ticks: Vec<(f64, String)>,
    /// The training losses and the validation losses, as (position, loss).
    pub curves: [Vec<(f64, f64)>; 2],
}

impl Picture {
    /// Draws the picture as SVG text. Losses that are not finite leave a gap.
    ///
    /// # Panics
    /// Never, since writing into a string cannot fail.
    pub fn draw(&self) -> String {
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
            .x_label_area_size(if self.parts.iter().all(|part| part.name.is_empty()) { 52 } else { 72 })
            .y_label_area_size(64)
            .build_cartesian_2d(x.clone(), y.clone())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .x_desc(self.x_label)
            .y_desc(AXIS)
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

    /// Returns a range that contains all losses and the loss of a uniform guess, with a margin.
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

/// Draws a part's labels and name below the axis.
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

/// Draws one dot per loss, joined by lines where losses are finite. Many losses become a faint line
/// and a smoothed one.
fn draw_losses(chart: &mut Chart<'_>, points: &[(f64, f64)], color: RGBColor, window: Option<usize>) -> Drawn {
    for part in points.split(|(_, loss)| !loss.is_finite()) {
        let Some(window) = window.filter(|_| !part.is_empty()) else {
            chart.draw_series(LineSeries::new(part.iter().copied(), color.stroke_width(2)))?;
            chart.draw_series(part.iter().map(|&point| Circle::new(point, 4, color.filled())))?;
            continue;
        };
        let each = losses_of_a_point(window);
        chart.draw_series(LineSeries::new(part.chunks(each).map(mean), faint(color)))?;
        chart.draw_series(LineSeries::new(means_around(part, window, each), color.stroke_width(2)))?;
    }
    Ok(())
}

fn faint(color: RGBColor) -> ShapeStyle {
    color.mix(0.4).stroke_width(1)
}

/// Returns the number of losses per point of a smoothed line.
fn losses_of_a_point(window: usize) -> usize {
    window.div_ceil(POINTS_IN_A_MEAN)
}

/// Returns the mean position and the mean loss of at least one point.
fn mean(points: &[(f64, f64)]) -> (f64, f64) {
    let sum = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
    (sum.0 / points.len() as f64, sum.1 / points.len() as f64)
}

/// Returns the mean of the `window` losses around every `each`-th position and the last one.
/// Windows are shorter at both ends.
fn means_around(points: &[(f64, f64)], window: usize, each: usize) -> impl Iterator<Item = (f64, f64)> {
    let around = move |at: usize| &points[at.saturating_sub(window / 2)..points.len().min(at + window.div_ceil(2))];
    let places = (0..points.len() - 1).step_by(each).chain([points.len() - 1]);
    places.map(move |at| (points[at].0, mean(around(at)).1))
}

/// Draws the legend next to the chart, so that it hides no loss.
fn draw_legend(area: &DrawingArea<SVGBackend<'_>, Shift>, classes: usize, window: Option<usize>) -> Drawn {
    let text = ("sans-serif", 14).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    let mean_of = |losses: usize| if losses > 1 { format!("training, mean of {losses}") } else { "training".into() };
    let mut rows = match window {
        None => vec![(mean_of(1), TRAIN.stroke_width(2), true)],
        Some(window) => vec![
            (mean_of(window), TRAIN.stroke_width(2), false),
            (mean_of(losses_of_a_point(window)), faint(TRAIN), false),
        ],
    };
    rows.push(("validation".into(), VALID.stroke_width(2), true));
    for (y, (name, style, dotted)) in (60..).step_by(22).zip(&rows) {
        area.draw(&PathElement::new([(0, y), (24, y)], *style))?;
        if *dotted {
            area.draw(&Circle::new((12, y), 4, style.filled()))?;
        }
        area.draw(&Text::new(name.clone(), (32, y), text.clone()))?;
    }
    let y = 60 + 22 * rows.len() as i32;
    for x in [0, 9, 18] {
        area.draw(&PathElement::new([(x, y), (x + 6, y)], QUIET.stroke_width(1)))?;
    }
    area.draw(&Text::new(format!("guessing: ln {classes} = {:.3}", (classes as f64).ln()), (32, y), text))?;
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
        assert!(many.contains(">\ntraining, mean of 10\n<") && many.contains(">\ntraining\n<"), "{many}");
        assert!(many.contains("opacity=\"0.4\"") && many.matches("<circle").count() == 1 + 1, "{many}");
    }

    #[test]
    fn a_long_run_has_a_small_picture() {
        let long = picture(200_000);
        assert!(
            long.contains(">\ntraining, mean of 10000\n<") && long.contains(">\ntraining, mean of 400\n<"),
            "{long}"
        );
        assert!(long.len() < 32 << 10, "{} bytes", long.len());
    }

    #[test]
    fn means_are_of_those_around() {
        let points = [(0.0, 4.0), (1.0, 2.0), (2.0, 0.0), (3.0, 10.0)];
        let means = |each| means_around(&points, 3, each).collect::<Vec<_>>();
        assert_eq!(means(1), [(0.0, 3.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0)]);
        assert_eq!(means(2), [(0.0, 3.0), (2.0, 4.0), (3.0, 5.0)]);
        assert_eq!(means_around(&points[..1], 3, 2).collect::<Vec<_>>(), [(0.0, 4.0)]);
        assert_eq!(mean(&points), (1.5, 4.0));
    }
}
