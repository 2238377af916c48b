// Package multipath measures copies between host memory and one GPU that use the PCIe links of
// several GPUs: directly, and through the memory of other GPUs, the relays. It has the figures of
// the MMA paper ("MultiPath Transfer Engine", seeds of package transfer's design), and the
// calibration of a machine.
//
// # What it is not
//
// It opens no devices, reads no flags, and reads no clock but the devices'. The engine that it
// measures is package transfer's; what is measured without it are the links themselves, and the
// static split that the engine is compared with.
//
// # How it measures
//
// What is compared takes turns: each round measures every cell once, and the median over the
// rounds counts, after a first round that does not. Copies that go on at once are measured while
// all of them are busy: a mark behind each copy says how far its link was at which time, and
// only the time between the last link's start and the first link's end counts.
//
// Before a cell of a static split, a relay, or of sizes, GPUs, chunks and thresholds with the engine
// counts, its copy is made once with bytes that tell their place, into memory that held others, and
// read back: a cell with a wrong byte is an error. Devices that keep no data are not checked.
//
// # Invariants
//
//   - The same options give the same copies in the same order.
//   - All memory is freed when a measurement ends, whichever way.
//
// # Example
//
//	r := multipath.Result{}
//	err := multipath.Measure(ctx, multipath.Options{
//		Machine: machine, GPU: device.HBM(0), Relays: []device.Space{device.HBM(1)},
//		Parts: []multipath.Part{multipath.LinksPart, multipath.StaticPart},
//	}, &r)
package multipath
