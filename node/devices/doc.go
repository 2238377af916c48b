// Package devices opens the devices of a node: a machine, its compute GPU, and a backend for
// that. It alone decides between emulated devices and GPUs.
//
// It selects the peers whose memory may be borrowed, opens their monitoring (OpenMonitor), and
// traces streams to a file.
//
//	d, err := devices.Open(devices.Options{Settings: s.Device, Peers: true})
//	defer d.Close()
//	d.Machine.Alloc(d.Space, …)
package devices
