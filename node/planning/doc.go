// Package planning is the bridge between settings and package planner: the planner's view
// of a machine (Machine), its problem with the settings that bound it (Problem), the
// settings of a policy (Planned), and what makes a model fit that does not (Advice).
//
// It opens no devices and allocates no device memory; it reads the files of hardware and of
// policies that settings name.
//
//	h, known := planning.Facts(m, space, peers).Known() // or LoadHardware, for named hardware
//	p, err := planning.New(footprint, planning.Options{Settings: s, Hardware: h})
//	planned, err := p.Follow()
//	err = s.Put(planned.Settings)
package planning
