//! A drawing: shapes on a sheet that follows the reader's light or dark.

use std::fmt::Write;

/// Width of every sheet, in its own units; a page scales it.
pub(crate) const WIDTH: i32 = 720;

/// The sheet has a ground of its own: the page around it may be dark where the system is light.
const STYLE: &str = "\
    .g{fill:#fbfcfc;stroke:#d6dddb}.i{fill:#17211f}.s{fill:#55625f}.l{stroke:#c3cecb}\
    .w{fill:#d8ebea}.f{fill:#f6cfc7}.b{fill:#0b6e75}.p{stroke:#0b6e75}.k{stroke:#17211f}.r{stroke:#b3321f}\
    text{font:13px system-ui,-apple-system,'Segoe UI','Liberation Sans',sans-serif}\
    .h{font-weight:600}.e{text-anchor:end}.m{text-anchor:middle}.t{font-size:12px}\
    path{fill:none;stroke-linecap:round}\
    @media(prefers-color-scheme:dark){\
    .g{fill:#171f1e;stroke:#2c3836}.i{fill:#e5ecea}.s{fill:#9fb0ac}.l{stroke:#42504d}\
    .w{fill:#1d3f3d}.f{fill:#5a2a21}.b{fill:#5cc4c4}.p{stroke:#5cc4c4}.k{stroke:#e5ecea}.r{stroke:#ff927d}}";

#[derive(Default)]
pub(crate) struct Svg {
    shapes: String,
}

impl Svg {
    pub(crate) fn text(&mut self, class: &str, x: i32, y: i32, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        writeln!(self.shapes, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>").unwrap();
    }

    pub(crate) fn block(&mut self, class: &str, x: i32, y: i32, width: i32, height: i32) {
        writeln!(
            self.shapes,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"4\"/>"
        )
        .unwrap();
    }

    pub(crate) fn path(&mut self, class: &str, width: i32, path: &str) {
        if !path.is_empty() {
            let shape = format!("<path class=\"{class}\" stroke-width=\"{width}\" d=\"{path}\"/>");
            writeln!(self.shapes, "{shape}").unwrap();
        }
    }

    /// A line that is dashed: a boundary, or a limit.
    pub(crate) fn dashes(&mut self, class: &str, path: &str) {
        let shape = format!("<path class=\"{class}\" stroke-dasharray=\"3 4\" d=\"{path}\"/>");
        writeln!(self.shapes, "{shape}").unwrap();
    }

    /// Requests that passed: discs of 8 units.
    pub(crate) fn passed(&mut self, places: &[(i32, i32)]) {
        self.path("p", 8, &places.iter().map(|(x, y)| format!("M{x} {y}h0")).collect::<String>());
    }

    /// Requests that were refused: crosses, so that color is not all that tells them apart.
    pub(crate) fn refused(&mut self, places: &[(i32, i32)]) {
        let cross = |(x, y): &(i32, i32)| format!("M{} {}l6 6m0-6l-6 6", x - 3, y - 3);
        self.path("r", 2, &places.iter().map(cross).collect::<String>());
    }

    /// Draws the legend of discs and crosses, at the right.
    pub(crate) fn key(&mut self, y: i32) {
        self.passed(&[(WIDTH - 142, y - 4)]);
        self.text("s t", WIDTH - 132, y, "passes");
        self.refused(&[(WIDTH - 78, y - 4)]);
        self.text("s t", WIDTH - 68, y, "refused");
    }

    pub(crate) fn finish(self, title: &str, description: &str, height: i32) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             role=\"img\" aria-labelledby=\"t d\">\n<title id=\"t\">{title}</title>\n\
             <desc id=\"d\">{description}</desc>\n<style>{STYLE}</style>\n\
             <rect class=\"g\" x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"12\"/>\n{}</svg>\n",
            WIDTH - 1,
            height - 1,
            self.shapes
        )
    }
}
