// Package observe reads what the parts of a running node count, for people and for
// programs: the metrics of each part (Experts, Links, Harvest, Pipeline), which collect
// themselves as metrics; the Report of a run; the Status of a server, and the lines that log
// it; where every expert is (Residency); and what happens to memory and experts (Event).
//
// A new counter goes into its part's own struct, and, to be a metric, into that part's
// file here: nothing else copies it.
//
// It counts nothing itself and changes nothing. But for Report, all of it may be read
// while requests run.
//
//	o := observe.New(observe.Parts{Store: store, …})
//	metrics.Write(w, o.Collectors(name)...)
//	report, err := o.Report(ctx)
package observe
