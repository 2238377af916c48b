// Package paper draws the figures of the Harvest paper (Gopal and Kaffes, "Harvest:
// Opportunistic Peer-to-Peer GPU Caching for LLM Inference") from results of package eval, beside the
// figures that the paper states: memory in use (Figure 2), the time to fetch an expert (3), the gain
// with half of the experts offloaded (5), and throughput over the offload fraction (6).
//
// # What it is not
//
// It measures nothing. The numbers of the paper are those of its text; what can only be read off its
// pictures is not here.
//
// # Invariants
//
//   - A figure says where its results are from: measured, with the device and the commit, or predicted,
//     with the rates of the emulated devices. Results of both kinds, or of different settings, in one
//     figure are an error.
//   - The paper's numbers are named as the paper's, and the note says how its setting differs.
//   - An error in the user's input wraps eval.ErrInput.
//
// # Example
//
//	chart, err := paper.Figure6(results)
//	err = chart.Write(file, "svg")
package paper
