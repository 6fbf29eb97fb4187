//! A timeline as an SVG picture, with bands by phase, a dashed line at the end of the arena, the
//! ends of steps, and refusals.
//!
//! Text is written as SVG text, so drawing needs no font. Every band shows its name on hover. The
//! picture is dark if the reader's system prefers dark pages.

use super::recording::Recording;
use super::timeline::Timeline;
use cuda_std::float_mode;
use std::fmt::{Result, Write};
use stepscope_core::Origin;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 480.0;
/// The edges of the plot.
const LEFT: f64 = 84.0;
const RIGHT: f64 = 752.0;
const TOP: f64 = 104.0;
const BOTTOM: f64 = 420.0;
/// The columns of the plot, one pixel each.
const COLUMNS: usize = (RIGHT - LEFT) as usize;

/// The largest ratio of arena to peak that is drawn. A larger arena is only named, because it would
/// flatten the picture.
const PEAKS_IN_SIGHT: u64 = 4;
/// The smallest distance between step ends, in pixels, at which they are drawn.
const LEAST_STEP: f64 = 8.0;
/// The smallest width of a step, in pixels, that has room for its number.
const NUMBERED_STEP: f64 = 52.0;

/// Colors that color-blind readers can distinguish (Okabe and Ito, Color Universal Design, 2008).
const PHASES: [&str; 6] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442"];
const PERSISTENT: &str = "#b4b4b4";
const OVERFLOW: &str = "url(#overflow)";
const REFUSED: &str = "#b00020";
const GROUND: &str = "#fff";
const INK: &str = "#222";
const QUIET: &str = "#5f5f5f";
const FAINT: &str = "#e1e1e1";
/// The replacements of these colors on a dark ground. Bands have the same colors on both.
const DARK: [(&str, &str); 5] =
    [(GROUND, "#161b22"), (INK, "#e6edf3"), (QUIET, "#a0a8b2"), (FAINT, "#343b44"), (REFUSED, "#ff7b86")];
const DASHED: &str = "stroke-width='1.5' stroke-dasharray='7 4'";

impl Recording {
    /// Draws the memory in use over time, stacked by phase, as SVG. Sizes are rounded up to the
    /// alignment.
    pub fn timeline_svg(&self) -> String {
        float_mode::in_default(|| {
            let mut picture = Picture::new(self);
            picture.draw().expect("writing into a string does not fail");
            picture.svg
        })
    }
}

struct Picture<'r> {
    recording: &'r Recording,
    line: Timeline<'r>,
    /// True if the end of the arena fits into the plot.
    in_sight: bool,
    /// The bytes at the top of the plot.
    top_bytes: f64,
    svg: String,
}

impl<'r> Picture<'r> {
    fn new(recording: &'r Recording) -> Self {
        let line = Timeline::new(recording, COLUMNS);
        let arena_end = line.columns.iter().map(|column| column.arena_end).max().unwrap_or(0);
        let in_sight = arena_end > 0 && arena_end <= PEAKS_IN_SIGHT.saturating_mul(line.peak_bytes);
        let highest = if in_sight { arena_end.max(line.peak_bytes) } else { line.peak_bytes };
        Self { recording, line, in_sight, top_bytes: highest.max(1) as f64 * 1.06, svg: String::new() }
    }

    fn x(&self, time_us: u64) -> f64 {
        LEFT + (RIGHT - LEFT) * self.line.part(time_us)
    }

    fn y(&self, bytes: u64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * bytes as f64 / self.top_bytes
    }

    fn draw(&mut self) -> Result {
        let dark = DARK
            .map(|(light, dark)| format!(" [fill='{light}'] {{fill: {dark}}} [stroke='{light}'] {{stroke: {dark}}}"))
            .concat();
        writeln!(
            self.svg,
            "<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}' \
             role='img' font-family='sans-serif' font-size='13' fill='{INK}'>\n\
             <defs><pattern id='overflow' width='7' height='7' patternUnits='userSpaceOnUse' \
             patternTransform='rotate(45)'><rect width='7' height='7' fill='#f7c9b0'/>\
             <rect width='3.5' height='7' fill='#d55e00'/></pattern></defs>\n\
             <style>@media (prefers-color-scheme: dark) {{{dark}}}</style>\n\
             <rect width='{WIDTH}' height='{HEIGHT}' fill='{GROUND}'/>"
        )?;
        self.heading()?;
        self.scales()?;
        self.bands()?;
        self.steps()?;
        self.marks()?;
        self.legend()?;
        writeln!(self.svg, "</svg>")
    }

    /// Writes the title and the most useful figures.
    fn heading(&mut self) -> Result {
        let Self { recording, line, .. } = self;
        let title = format!("Memory in use on {}", escaped(&recording.device));
        let (unit, size) = unit_of_time(line.span_us);
        let peak = match line.peak_bytes {
            0 => "nothing in use".to_owned(),
            bytes => format!("peak {} at {:.2} {unit}", amount(bytes), (line.peak_us - line.start_us) as f64 / size),
        };
        let steps = counted(line.resets_us.len(), "step");
        let events = counted(recording.events.len(), "event");
        let forgotten = match recording.forgotten_events {
            0 => String::new(),
            events => format!(" ({events} earlier ones not kept)"),
        };
        writeln!(
            self.svg,
            "<title>{title}</title>\n<text x='{LEFT}' y='32' font-size='20'>{title}</text>\n\
             <text x='{LEFT}' y='54' fill='{QUIET}'>{peak}, {steps}, {events}{forgotten}</text>"
        )?;
        let Some((site, bytes)) = line.holds_most(recording) else { return Ok(()) };
        let (site, bytes) = (escaped(&site), amount(bytes));
        writeln!(self.svg, "<text x='{LEFT}' y='72' fill='{QUIET}'>of the peak {bytes} are tensors of {site}</text>")
    }

    fn scales(&mut self) -> Result {
        let (unit, size) = unit_of_bytes(self.top_bytes as u64);
        let (marks, decimals) = ticks(self.top_bytes / size, 6.0);
        for mark in marks {
            let y = self.y((mark * size) as u64);
            let (text_x, text_y) = (LEFT - 8.0, y + 4.5);
            writeln!(
                self.svg,
                "<path d='M{LEFT} {y:.1}H{RIGHT}' stroke='{FAINT}'/>\
                 <text x='{text_x}' y='{text_y:.1}' text-anchor='end'>{mark:.decimals$}</text>"
            )?;
        }
        let middle = (TOP + BOTTOM) / 2.0;
        writeln!(
            self.svg,
            "<text transform='translate(24 {middle}) rotate(-90)' text-anchor='middle' font-size='14'>memory in use \
             ({unit})</text>"
        )?;

        let (unit, size) = unit_of_time(self.line.span_us);
        let (marks, decimals) = ticks(self.line.span_us as f64 / size, 8.0);
        for mark in marks {
            let x = LEFT + (RIGHT - LEFT) * mark * size / self.line.span_us as f64;
            let text_y = BOTTOM + 20.0;
            writeln!(
                self.svg,
                "<path d='M{x:.1} {BOTTOM}v5' stroke='{QUIET}'/>\
                 <text x='{x:.1}' y='{text_y}' text-anchor='middle'>{mark:.decimals$}</text>"
            )?;
        }
        let (middle, below) = ((LEFT + RIGHT) / 2.0, BOTTOM + 44.0);
        writeln!(self.svg, "<text x='{middle}' y='{below}' text-anchor='middle' font-size='14'>time ({unit})</text>")
    }

    /// Draws each band from the ground to its top, the highest first, so that the lower ones cover
    /// it.
    fn bands(&mut self) -> Result {
        for (at, layer) in self.line.layers.iter().enumerate().rev() {
            let top = path(self.line.columns.iter().map(|column| self.y(column.levels[..=at].iter().sum())));
            let (fill, name, most) = (self.fill(at), escaped(layer.name()), amount(layer.peak_bytes));
            writeln!(
                self.svg,
                "<path class='band' d='{top}V{BOTTOM}H{LEFT}Z' fill='{fill}'>\
                 <title>{name}: at most {most}</title></path>"
            )?;
        }
        writeln!(self.svg, "<path d='M{LEFT} {TOP}V{BOTTOM}H{RIGHT}' fill='none' stroke='{QUIET}'/>")
    }

    fn fill(&self, layer: usize) -> &'static str {
        let layers = &self.line.layers;
        match layers[layer].origin {
            Origin::Persistent => PERSISTENT,
            Origin::Overflow => OVERFLOW,
            Origin::Arena => {
                let phases_below = layers[..layer].iter().filter(|layer| layer.origin == Origin::Arena).count();
                PHASES[phases_below % PHASES.len()]
            }
        }
    }

    /// Draws the ends of steps, with their numbers where there is room.
    fn steps(&mut self) -> Result {
        let ends: Vec<f64> = self.line.resets_us.iter().map(|&time_us| self.x(time_us)).collect();
        if ends.len() as f64 * LEAST_STEP > RIGHT - LEFT {
            return Ok(());
        }
        let (line_top, text_y) = (TOP - 16.0, TOP - 5.0);
        let mut start = LEFT;
        for (number, end) in (self.recording.start.resets + 1..).zip(ends) {
            writeln!(
                self.svg,
                "<path class='step' d='M{end:.1} {line_top}V{BOTTOM}' stroke='{QUIET}' stroke-dasharray='2 3'/>"
            )?;
            if end - start >= NUMBERED_STEP {
                let middle = (start + end) / 2.0;
                writeln!(
                    self.svg,
                    "<text x='{middle:.1}' y='{text_y}' text-anchor='middle' font-size='12' fill='{QUIET}'>step \
                     {number}</text>"
                )?;
            }
            start = end;
        }
        Ok(())
    }

    /// Draws the end of the arena, the refusals and the peak.
    fn marks(&mut self) -> Result {
        if self.in_sight {
            let line = path(self.line.columns.iter().map(|column| self.y(column.arena_end)));
            writeln!(self.svg, "<path class='arena' d='{line}' fill='none' stroke='{INK}' {DASHED}/>")?;
        }
        for &(time_us, bytes) in &self.line.refusals {
            let (x, y) = (self.x(time_us), self.y(bytes));
            writeln!(
                self.svg,
                "<path class='refused' d='M{x:.1} {y:.1}l-5 -9h10z' fill='{REFUSED}' stroke='{GROUND}'/>"
            )?;
        }
        if self.line.peak_bytes > 0 {
            let (x, y) = (self.x(self.line.peak_us), self.y(self.line.peak_bytes));
            writeln!(
                self.svg,
                "<circle class='peak' cx='{x:.1}' cy='{y:.1}' r='3.5' fill='{GROUND}' stroke='{INK}'/>"
            )?;
        }
        Ok(())
    }

    /// Draws the legend next to the plot, in the order of the stack.
    fn legend(&mut self) -> Result {
        let mut rows = Vec::new();
        for (at, layer) in self.line.layers.iter().enumerate().rev() {
            let mark = format!("<rect y='-7' width='16' height='14' fill='{}'/>", self.fill(at));
            rows.push((mark, escaped(layer.name()), format!("at most {}", amount(layer.peak_bytes))));
        }
        if self.line.arena_bytes > 0 {
            let mark = format!("<path d='M-1 0h18' stroke='{INK}' {DASHED}/>");
            let persistent = self.line.layers.iter().any(|layer| layer.origin == Origin::Persistent);
            let capacity = amount(self.line.arena_bytes);
            let detail = match (self.in_sight, persistent) {
                (false, _) => format!("{capacity}, out of sight"),
                (true, true) => format!("persistent + {capacity}"),
                (true, false) => capacity,
            };
            rows.push((mark, "arena capacity".to_owned(), detail));
        }
        if !self.line.refusals.is_empty() {
            let mark = format!("<path d='M8 5l-5 -9h10z' fill='{REFUSED}'/>");
            rows.push((mark, "refused".to_owned(), counted(self.line.refusals.len(), "request")));
        }
        if self.line.peak_bytes > 0 {
            let mark = format!("<circle cx='8' r='3.5' fill='{GROUND}' stroke='{INK}'/>");
            rows.push((mark, "peak".to_owned(), amount(self.line.peak_bytes)));
        }
        let x = RIGHT + 28.0;
        for (at, (mark, name, detail)) in rows.into_iter().enumerate() {
            let y = TOP + 8.0 + 40.0 * at as f64;
            writeln!(
                self.svg,
                "<g transform='translate({x} {y})'>{mark}<text x='26' y='4'>{name}</text>\
                 <text x='26' y='20' font-size='12' fill='{QUIET}'>{detail}</text></g>"
            )?;
        }
        Ok(())
    }
}

/// Returns a path that is level within each column.
fn path(heights: impl Iterator<Item = f64>) -> String {
    let mut path = String::new();
    let mut last = String::new();
    for (column, y) in heights.enumerate() {
        let (x, y) = (LEFT + column as f64, format!("{y:.1}"));
        if column == 0 {
            path = format!("M{x} {y}");
        } else if y != last {
            path += &format!("H{x}V{y}");
        }
        last = y;
    }
    path + &format!("H{RIGHT}")
}

/// The name of a unit, and its size in bytes or microseconds.
type Unit = (&'static str, f64);

fn unit_of_bytes(bytes: u64) -> Unit {
    match bytes {
        0..0x20_0000 => ("KiB", 1024.0),
        0x20_0000..0x8000_0000 => ("MiB", 1_048_576.0),
        _ => ("GiB", 1_073_741_824.0),
    }
}

fn unit_of_time(microseconds: u64) -> Unit {
    match microseconds {
        0..2_000 => ("\u{b5}s", 1.0),
        2_000..20_000_000 => ("ms", 1e3),
        _ => ("s", 1e6),
    }
}

fn amount(bytes: u64) -> String {
    let (name, size) = unit_of_bytes(bytes);
    format!("{:.1} {name}", bytes as f64 / size)
}

fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Returns about `count` round marks of an axis that ends at `end`, and the decimals they need.
fn ticks(end: f64, count: f64) -> (Vec<f64>, usize) {
    let least = end / count;
    let decade = 10f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().map(|part| part * decade).find(|&step| step >= least);
    let step = step.unwrap_or(10.0 * decade);
    let decimals = (-step.log10().floor()).max(0.0) as usize;
    ((0..).map(|at| f64::from(at) * step).take_while(|&mark| mark <= end * (1.0 + 1e-9)).collect(), decimals)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ARENA, OVERFLOW, WEIGHTS, event, step};
    use super::*;
    use stepscope_core::{Event, Kind};

    fn sample() -> Recording {
        let mut recording = Recording::new("emulated <&> CPU", 1000);
        recording.push(event(0, Kind::Reserve, ARENA, 64 << 20));
        recording.push(event(0, Kind::Allocate, WEIGHTS, 9 << 20));
        let tensors = [(30 << 20, "forward"), (20 << 20, "backward"), (40 << 20, "backward"), (1 << 20, "optimiser")];
        (0..3).for_each(|at| step(&mut recording, 1000 * at, &tensors, 64 << 20));
        recording.push(event(3000, Kind::Refuse { free_bytes: 1 }, 0, 1 << 40));
        recording
    }

    /// Returns a path's height at a column, as it appears in the picture.
    fn height(svg: &str, class: &str, column: usize) -> Vec<f64> {
        let lines = svg.lines().filter(|line| line.contains(&format!("class='{class}'")));
        lines
            .map(|line| {
                let data = line.split("d='M").nth(1).unwrap().split('\'').next().unwrap();
                let (start, rest) = data.split_once('H').unwrap();
                let mut y: f64 = start.split_once(' ').unwrap().1.parse().unwrap();
                for move_to in rest.split('H') {
                    let Some((x, next)) = move_to.split_once('V') else { break };
                    if x.parse::<f64>().unwrap() > LEFT + column as f64 {
                        break;
                    }
                    y = next.parse().unwrap();
                }
                y
            })
            .collect()
    }

    #[test]
    fn svg_has_all_parts() {
        let svg = sample().timeline_svg();
        let count = |class: &str| svg.matches(&format!("class='{class}'")).count();
        assert_eq!((count("band"), count("arena"), count("step"), count("refused"), count("peak")), (5, 1, 3, 1, 1));
        for text in [
            ">overflow<",
            ">optimiser<",
            ">backward<",
            ">forward<",
            ">persistent<",
            ">arena capacity<",
            ">persistent + 64.0 MiB<",
            ">1 request<",
            ">memory in use (MiB)<",
            ">time (ms)<",
            "Memory in use on emulated &lt;&amp;&gt; CPU",
            ">peak 100.0 MiB at 0.03 ms, 3 steps, 21 events<",
            ">of the peak 100.0 MiB are tensors of host/core/src/ops/activation.rs:21<",
        ] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
    }

    #[test]
    fn dark_theme_changes_colours_except_bands() {
        let svg = sample().timeline_svg();
        let (style, drawn) = svg.split_once("</style>").unwrap();
        let colours = drawn.split('\'').filter(|value| value.starts_with('#'));
        let mut others: Vec<&str> =
            colours.filter(|colour| !PHASES.contains(colour) && *colour != PERSISTENT).collect();
        others.sort();
        others.dedup();
        assert_eq!(others.len(), DARK.len(), "{others:?}");
        for colour in others {
            assert!(style.contains(&format!("[fill='{colour}'] {{fill: #")), "{colour} in {style}");
        }
    }

    #[test]
    fn band_heights_match_bytes() {
        let mut recording = Recording::new("emulated", 100);
        recording.push(event(0, Kind::Reserve, ARENA, 4 << 20));
        recording.push(event(0, Kind::Allocate, WEIGHTS, 1 << 20));
        recording.push(Event { phase: "backward", ..event(500, Kind::Allocate, ARENA, 2 << 20) });
        recording.push(event(1000, Kind::Reset, ARENA, 2 << 20));
        let svg = recording.timeline_svg();
        // The end of the arena, 5 MiB, is the highest and leaves 6 % above.
        let y = |mib: f64| BOTTOM - (BOTTOM - TOP) * mib / (5.0 * 1.06);
        let close = |got: Vec<f64>, expected: &[f64]| {
            got.len() == expected.len() && got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 0.06)
        };
        let (early, late) = (COLUMNS / 4, 3 * COLUMNS / 4);
        assert!(close(height(&svg, "band", early), &[y(1.0), y(1.0)]), "{svg}");
        assert!(close(height(&svg, "band", late), &[y(3.0), y(1.0)]), "the upper band is drawn first: {svg}");
        assert!(close(height(&svg, "arena", late), &[y(5.0)]), "{svg}");
    }

    #[test]
    fn large_arena_keeps_bands_visible() {
        let mut recording = Recording::new("emulated", 100);
        recording.push(event(0, Kind::Reserve, ARENA, 64 << 30));
        recording.push(event(5, Kind::Allocate, ARENA, 1 << 20));
        let svg = recording.timeline_svg();
        assert!(!svg.contains("class='arena'") && svg.contains(">64.0 GiB, out of sight<"), "{svg}");
    }

    #[test]
    fn empty_and_huge_recordings_are_drawn() {
        let empty = Recording::new("emulated", 0).timeline_svg();
        assert!(empty.contains("nothing in use, 0 steps, 0 events"), "{empty}");
        assert!(!empty.contains("NaN") && !empty.contains("inf"), "{empty}");

        let mut long = Recording::new("emulated", 30_000);
        let tensors: Vec<_> = (0..99).map(|at| (1 + 977 * at, "forward")).collect();
        (0..1000).for_each(|at| step(&mut long, 1000 * at, &tensors, 1 << 20));
        let svg = long.timeline_svg();
        assert!(svg.len() < 64 << 10, "{} bytes", svg.len());
        assert!(svg.contains("earlier ones not kept") && !svg.contains("class='step'"), "too many steps to mark");
    }

    #[test]
    fn simultaneous_events_leave_no_gap() {
        let mut recording = Recording::new("emulated", 10);
        (0..4).for_each(|at| recording.push(event(77, Kind::Allocate, OVERFLOW + at * 4096, 4096)));
        let svg = recording.timeline_svg();
        assert!(svg.contains("peak 16.0 KiB at 0.00 \u{b5}s") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn axis_marks_are_round() {
        assert_eq!(ticks(67.8, 6.0), (vec![0.0, 20.0, 40.0, 60.0], 0));
        assert_eq!(ticks(1.0, 8.0).1, 1);
        assert_eq!(ticks(0.25, 5.0), ((0..6).map(|at| f64::from(at) * 0.05).collect(), 2));
        for end in [1e-3, 0.7, 1.0, 9.99, 1e3, 123_456.0] {
            let (marks, _) = ticks(end, 6.0);
            assert!(
                (3..=8).contains(&marks.len()) && marks.iter().all(|&mark| mark <= end * 1.000_001),
                "{end} {marks:?}"
            );
        }
    }
}
