// Package planning is the bridge between settings and package planner: what a machine is
// to the planner (Machine), what is to be planned for with the settings that bound it
// (Problem), and what a policy comes to in settings (Planned).
//
// It opens no devices and takes no memory; it reads the files of hardware and of policies
// that settings name.
//
//	h, known := planning.Facts(m, space, peers).Known() // or LoadHardware, for named hardware
//	p, err := planning.New(footprint, planning.Options{Settings: s, Hardware: h})
//	planned, err := p.Follow()
//	err = s.Put(planned.Settings)
package planning
