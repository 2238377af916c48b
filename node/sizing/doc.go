// Package sizing computes the memory of an engine, and whether it fits: a Footprint of a
// model under some settings, the Needs of a placement of experts, the KV cache that gets
// the rest, and the budgets of peers.
//
// It is arithmetic: it allocates no device memory, queries no device and reads no file. The
// memory that a node allocates, that it reports as needed and that the planner predicts are
// all computed here, so that they are equal.
//
//	f, err := sizing.New(sizing.Options{Config: config, Layout: layout, Types: backend})
//	placement, err := f.Place(s.Offload, list)
//	needs, err := f.Needs(s.Batch, placement, memories)
//	fit, err := needs.Fit(s.Batch.MaxNumSeqs, s.KV)
package sizing
