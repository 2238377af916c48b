// Package devices opens what a node computes on: a machine, the GPU of it that computes,
// and a backend for that. It alone picks between emulated devices and GPUs.
//
// It chooses the peers whose memory may be borrowed, opens what they are watched through
// (OpenMonitor), and has streams traced to a file.
//
//	d, err := devices.Open(devices.Options{Settings: s.Device, Peers: true})
//	defer d.Close()
//	d.Machine.Alloc(d.Space, …)
package devices
