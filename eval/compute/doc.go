// Package compute measures what the engine reaches on a GPU, so that the planner can predict steps of
// models that were not measured: it times decode and prefill steps of a few models of generic shapes,
// with random weights and everything in the GPU's memory, and fits planner.Compute to them.
//
// # Parts
//
//   - Case is a model with steps to time; DefaultCases differ in one thing at a time: layers, width and number of
//     experts, a shared expert, heads, vocabulary.
//   - Measure runs the steps on nodes that its caller opens. Point is the time of one step.
//   - Fit finds the planner.Compute whose predictions are closest to the points.
//
// # What it is not
//
// It measures no copies (package eval does), and no model that is to be predicted: none of the
// cases has the shape of a preset.
//
// # Invariants
//
//   - Fit depends on nothing but the points: the same points give the same result.
//   - What Fit returns is valid (planner.Compute.Validate).
package compute
