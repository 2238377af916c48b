// Package sizing works out what an engine takes of which memory, and whether that is
// there: a Footprint of a model under some settings, the Needs of a placement of experts,
// the KV cache that the rest is used for, and what peers can lend.
//
// It is arithmetic: it takes no memory, asks no device and reads no file. What a node
// takes, what it says that it needs and what the planner counts with are all from here,
// so that they are the same.
//
//	f, err := sizing.New(sizing.Options{Config: config, Layout: layout, Types: backend})
//	placement, err := f.Place(s.Offload, list)
//	needs, err := f.Needs(s.Batch, placement, memories)
//	fit, err := needs.Fit(s.Batch.MaxNumSeqs, s.KV)
package sizing
