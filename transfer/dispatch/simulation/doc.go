// Package simulation lets the core of package dispatch copy over the links of a simulated machine,
// and says how long the same copies would take at best, and by static splits.
//
//	m := simulation.Machine{GPUs: 4, PCIe: 54e9, NVLink: 395e9, Roots: []simulation.Root{{GPUs: []int{0, 1}, Rate: 60e9}}}
//	took := m.Copy(1<<30, simulation.Default())
//	best := m.Oracle(1<<30, 0)
//
// # What is simulated
//
// Each link is a stream that makes one copy after the other. The copies of all streams, and the
// flows of other programs, share the wires fairly (max-min): a GPU's own in each direction, that
// of its root, and its ports to other GPUs. The host needs time for each chunk that it enqueues,
// and learns of the end of one after a random delay; it does one thing at a time.
//
// The oracle is a lower bound: all links copy all the time, without chunks, latency or host. A
// static split copies a fixed share of each copy over each link, without chunks and latency too.
package simulation
