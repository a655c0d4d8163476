//! Plots of results, as SVG files beside their page.

use crate::report::Runs;
use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::SegmentValue;
use plotters::prelude::*;
use std::path::Path;

const WIDTH: u32 = 860;
/// Heights: a row of [`Data::Spreads`], the frame around the rows, and [`Data::Lines`].
const ROW: u32 = 24;
const FRAME: u32 = 100;
const LINES: u32 = 420;
const FONT: (&str, u32) = ("sans-serif", 14);
const COLOURS: [RGBColor; 4] = [
    RGBColor(0x1f, 0x5f, 0xa8),
    RGBColor(0xc0, 0x50, 0x20),
    RGBColor(0x70, 0x40, 0x90),
    RGBColor(0x30, 0x80, 0x70),
];
const AIM: RGBColor = RGBColor(0x60, 0x90, 0x40);

/// A plot.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The suffix of the file's name, after the page's name.
    pub name: &'static str,
    /// The title, also the text alternative in the page.
    pub title: String,
    /// The label of the horizontal axis.
    pub axis: String,
    /// The data.
    pub data: Data,
}

/// A point with its label.
pub type Point = (f64, f64, &'static str);

/// The data of a plot.
#[derive(Clone, Debug)]
pub enum Data {
    /// Measurements in rows: the median, and a line from the least to the greatest.
    Spreads {
        /// Name and runs of each row.
        rows: Vec<(String, Runs)>,
        /// The least value aimed for.
        aim: Option<f64>,
    },
    /// Curves through labelled points, on two logarithmic axes.
    Trades {
        /// The label of the vertical axis.
        axis: &'static str,
        /// Name and points of each curve.
        curves: Vec<(String, Vec<Point>)>,
    },
    /// Curves over a logarithmic axis.
    Lines {
        /// The label of the vertical axis.
        axis: &'static str,
        /// Name and points of each curve.
        curves: Vec<(&'static str, Vec<(f64, f64)>)>,
    },
}

impl Plot {
    /// Writes the plot into a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> Result<()> {
        let drawn = match &self.data {
            Data::Spreads { rows, aim } => self.spreads(file, rows, *aim),
            Data::Trades { axis, curves } => self.trades(file, axis, curves),
            Data::Lines { axis, curves } => self.lines(file, axis, curves),
        };
        drawn.map_err(|error| anyhow!("drawing {}: {error}", file.display()))
    }

    fn spreads(
        &self,
        file: &Path,
        rows: &[(String, Runs)],
        aim: Option<f64>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let spreads = || rows.iter().filter_map(|(_, runs)| runs.spread());
        let least = spreads().map(|[least, _]| least).chain(aim).fold(f64::INFINITY, f64::min);
        let most = spreads().map(|[_, most]| most).chain(aim).fold(f64::NEG_INFINITY, f64::max);
        let margin = ((most - least) / 20.0).max(most.abs() / 1000.0);
        let count = rows.len() as i32;
        let root = SVGBackend::new(file, (WIDTH, FRAME + ROW * rows.len() as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, (FONT.0, 17))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(190)
            .build_cartesian_2d(least - margin..most + margin, (0..count).into_segmented())?;
        let name = |at: &SegmentValue<i32>| match at {
            // The first row is on top.
            SegmentValue::CenterOf(i) => usize::try_from(count - 1 - i)
                .ok()
                .and_then(|i| rows.get(i))
                .map_or("", |(name, _)| name)
                .to_owned(),
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .disable_y_mesh()
            // Zero on this axis only: asked for none on an axis of whole numbers, the library (0.3.7) multiplies until it
            // overflows.
            .x_max_light_lines(0)
            .x_desc(&self.axis)
            .x_label_formatter(&short)
            .y_labels(rows.len() + 1)
            .y_label_formatter(&name)
            .label_style(FONT)
            .draw()?;
        if let Some(aim) = aim {
            let ends = [(aim, SegmentValue::Exact(0)), (aim, SegmentValue::Exact(count))];
            chart.draw_series(std::iter::once(PathElement::new(ends, AIM.stroke_width(2))))?;
        }
        let bar = |(i, (_, runs)): (usize, &(String, Runs))| {
            let [least, most] = runs.spread()?;
            let at = SegmentValue::CenterOf(count - 1 - i as i32);
            Some(ErrorBar::new_horizontal(at, least, runs.median()?, most, COLOURS[0].filled(), 9))
        };
        chart.draw_series(rows.iter().enumerate().filter_map(bar))?;
        root.present()?;
        Ok(())
    }

    fn trades(
        &self,
        file: &Path,
        axis: &str,
        curves: &[(String, Vec<Point>)],
    ) -> Result<(), Box<dyn std::error::Error>> {
        let points = || curves.iter().flat_map(|(_, points)| points);
        let horizontal = logarithmic(points().map(|point| point.0));
        let vertical = logarithmic(points().map(|point| point.1));
        let root = SVGBackend::new(file, (WIDTH, LINES)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, (FONT.0, 17))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(60)
            .build_cartesian_2d(horizontal.log_scale(), vertical.log_scale())?;
        chart
            .configure_mesh()
            .max_light_lines(0)
            .x_desc(&self.axis)
            .y_desc(axis)
            .x_label_formatter(&short)
            .y_label_formatter(&short)
            .label_style(FONT)
            .draw()?;
        for ((name, points), colour) in curves.iter().zip(COLOURS) {
            let places = points.iter().map(|&(x, y, _)| (x, y));
            let line = LineSeries::new(places, colour.stroke_width(2)).point_size(4);
            let key = move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2));
            chart.draw_series(line)?.label(name).legend(key);
            let label = |&(x, y, label): &Point| {
                EmptyElement::at((x, y)) + Text::new(label, (7, -14), FONT.into_font().color(&colour))
            };
            chart.draw_series(points.iter().map(label))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .label_font(FONT)
            .draw()?;
        root.present()?;
        Ok(())
    }

    fn lines(
        &self,
        file: &Path,
        axis: &str,
        curves: &[(&'static str, Vec<(f64, f64)>)],
    ) -> Result<(), Box<dyn std::error::Error>> {
        let points = || curves.iter().flat_map(|(_, points)| points);
        let least = points().map(|&(x, _)| x).fold(f64::INFINITY, f64::min);
        let most = points().map(|&(x, _)| x).fold(f64::NEG_INFINITY, f64::max);
        let highest = points().map(|&(_, y)| y).fold(0.0, f64::max);
        let root = SVGBackend::new(file, (WIDTH, LINES)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, (FONT.0, 17))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(60)
            .build_cartesian_2d((least..most).log_scale(), 0.0..highest * 1.05)?;
        chart
            .configure_mesh()
            .max_light_lines(0)
            .x_desc(&self.axis)
            .y_desc(axis)
            .x_label_formatter(&short)
            .y_label_formatter(&short)
            .label_style(FONT)
            .draw()?;
        for ((name, points), colour) in curves.iter().zip(COLOURS) {
            let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2)).point_size(3);
            let key = move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2));
            chart.draw_series(line)?.label(*name).legend(key);
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE.mix(0.8))
            .label_font(FONT)
            .draw()?;
        root.present()?;
        Ok(())
    }
}

/// The range of a logarithmic axis for these values, with room at both ends.
fn logarithmic(values: impl Iterator<Item = f64> + Clone) -> std::ops::Range<f64> {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    least * 0.7..values.fold(0.0, f64::max) * 1.6
}

/// The label of a value on an axis.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the library's signature")]
fn short(value: &f64) -> String {
    format!("{}", (value * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::{Data, Plot};

    fn drawn(data: Data) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("plot.svg");
        let plot = Plot { name: "x", title: "Shares of runs".to_owned(), axis: "% of it".to_owned(), data };
        plot.write(&file).unwrap();
        std::fs::read_to_string(file).unwrap()
    }

    #[test]
    fn each_row_has_its_name_and_its_median() {
        let rows = [("first", [90.0, 95.0, 99.0]), ("second", [97.0, 98.0, 100.0])];
        let rows = rows.map(|(name, runs)| (name.to_owned(), runs.into_iter().collect()));
        let svg = drawn(Data::Spreads { rows: rows.into(), aim: Some(99.0) });
        for text in ["Shares of runs", "first", "second", "% of it"] {
            assert!(svg.contains(text), "{text} is missing in {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
    }

    #[test]
    fn each_point_of_a_trade_has_its_label() {
        let points = |by: f64| vec![(10.0 * by, 5.0, "1k"), (1.0, 50.0 / by, "100k")];
        let curves = vec![("ours".to_owned(), points(1.0)), ("theirs".to_owned(), points(2.0))];
        let svg = drawn(Data::Trades { axis: "µs", curves });
        for (text, times) in [("ours", 1), ("theirs", 1), ("\n1k\n", 2), ("\n100k\n", 2)] {
            assert_eq!(svg.matches(text).count(), times, "{text} in {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    }

    #[test]
    fn each_curve_has_its_points_and_its_name() {
        let curves =
            vec![("ours", vec![(10.0, 5.0), (1000.0, 5.0)]), ("theirs", vec![(10.0, 5.0), (1000.0, 1.0)])];
        let svg = drawn(Data::Lines { axis: "1e6/s", curves });
        for text in ["ours", "theirs", "1e6/s"] {
            assert!(svg.contains(text), "{text} is missing in {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    }
}
