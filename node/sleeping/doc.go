// Package sleeping gives the memory of a model that is not used back to its devices, and brings it
// back: the memory's side of sleep and wake.
//
//	s := sleeping.New(sleeping.Options{Machine: m, Transfer: e})
//	times, err := s.Sleep(ctx, contents, sleeping.Copy)
//	times, err = s.Wake(ctx, nil, reload) // in all memories there is again what was there
//
// Memory is suspended, not freed: its addresses stay, and with them whatever contains addresses.
//
// # Levels
//
// At level Copy the weights go to pinned host memory, at level Drop nowhere: they must be loaded
// again. At both levels the content of the KV cache and of scratch memory is lost, a few lasting
// tables are copied, and resident experts that host memory has, too, come back from there.
//
// # What it is not
//
// It neither stops a model nor decides when it sleeps: its user sees to it that nothing uses the
// memory. It knows neither requests nor peers.
//
// # Invariants
//
//   - Nothing is suspended before all copies have landed: a Sleep that fails, and says so before
//     that, leaves everything as it was.
//   - A Wake that fails leaves all memory suspended that was, and the copies in host memory as they
//     were: it can be tried again.
package sleeping
