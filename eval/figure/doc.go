// Package figure draws charts as SVG and PNG: lines over a common horizontal axis, in one
// panel or several above each other, and bars by group.
//
// # What it is not
//
// It computes nothing: points, names and units are its caller's. It is no plotting
// library either; it has the two kinds of chart that package eval prints.
//
// # How it draws
//
// A chart is laid out once, into a scene of strokes, areas and texts in pixels, and the
// scene is written as SVG or rasterized. Texts are measured with Liberation Sans, which
// has the widths of Arial and Helvetica, and have the room that the wider DejaVu Sans
// would need, so that they stay apart in whichever font a viewer has. Names of vertical
// lines stand in lanes above the plot, the legend stands above these: no text lies where
// data may be.
//
// An SVG has its own background, and colors for light and for dark pages
// (prefers-color-scheme); a PNG has those for light pages.
//
// # Invariants
//
//   - The same chart gives the same bytes.
//   - No two texts overlap, and none leaves the picture.
//   - Series differ in dashes and marks, too, not in color alone.
//   - Text has a contrast of 4.5 to 1 with the background, lines of 3 to 1 (WCAG 2.2);
//     the grid is fainter, as its lines only lead the eye to labeled ticks.
//
// # Example
//
//	chart := &figure.Lines{
//		Title: "Decode throughput",
//		X:     figure.Axis{Label: "experts offloaded (% of all)", From: 0, To: 100},
//		Panels: []figure.Panel{{
//			Y:      figure.Axis{Label: "tokens/s"},
//			Series: []figure.Series{{Name: "measured", Look: figure.LookA, Points: points, Line: true, Marks: true}},
//		}},
//	}
//	err := chart.Write(file, "svg")
package figure
