package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval"
	"github.com/moeserve/moeserve/eval/multipath"
	"github.com/moeserve/moeserve/node/bench"
	"github.com/moeserve/moeserve/node/devices"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/node/planning"
	"github.com/moeserve/moeserve/planner"
)

// maxMiB is the maximum size of copies: sums of sizes up to a pebibyte do not overflow.
const maxMiB = 1 << 30

// transferOptions are the flags of bench transfer alone.
type transferOptions struct {
	largest, repetitions int
	calibrate, csv       string
	plots                []string
	links                bool
}

func newBenchTransfer(s *streams) *cobra.Command {
	var o transferOptions
	cmd := &cobra.Command{
		Use:   "transfer",
		Short: "Measure latency and rate of copies by size",
		Long: `Measure copies to the GPU that computes by size, from 64 KiB to the size of an
expert of Mixtral, or to --largest-mib: from pinned host memory, from a peer, from both
at once, and back to the host. A latency is the median of single copies, a rate that
of copies that are queued back to back.

--plot draws latency over size, with models named at the size of one of their
experts, and the ratio of host to peer.

--calibrate writes the rates as hardware for --hardware, on GPUs also those at which a
kernel reads host and peer memory (for --expert-access). With --peers it finds how copies
between host and GPU use the links of the peers best: which of them pay as relays,
the sizes of chunks and from which size of a copy on relays are used, and which links
share a rate. What copies do not show (memory sizes, compute rates) comes from
--hardware, or from the devices where it is known.

--links measures every link of the GPU and its --peers in place of sizes: host to GPU,
GPU to host, GPU to GPU, each alone and all at once, which is the most that copies over
several links can reach.

Ctrl-C ends the measurement with the sizes that are done.`,
		Example: `  moeserve bench transfer --device cuda --peers 1,2,3 --links
  moeserve bench transfer --device cuda --peers 1 --hardware h200 \
      --calibrate here.json
  moeserve bench transfer \
      --emulate virtual,pcie=55.3GB/s,nvlink=395GB/s,latency=8us`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			if o.links {
				return benchLinks(cmd.Context(), s, set, &o)
			}
			return benchTransfer(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench transfer"))
	f := cmd.Flags()
	f.BoolVar(&o.links, "links", false, "measure the rate of every link, alone and all at once")
	f.IntVar(&o.largest, "largest-mib", 336, "maximum size of copies, in `MiB`")
	f.IntVar(&o.repetitions, "repetitions", 10, "`NUMBER` of single copies whose median is the latency")
	f.Var((*pathValue)(&o.calibrate), "calibrate", "write the measured hardware to a JSON file")
	addCSV(cmd, &o.csv)
	f.Var((*pathList)(&o.plots), "plot", "draw latencies over sizes to a .svg or .png; repeatable")
	return cmd
}

func benchTransfer(ctx context.Context, s *streams, set *settings, o *transferOptions) (err error) {
	base, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	if o.largest < 1 || o.largest > maxMiB {
		return usagef("--largest-mib is %d: must be from 1 to %d", o.largest, maxMiB)
	}
	if o.repetitions < 1 {
		return usagef("--repetitions is %d: must be at least 1", o.repetitions)
	}
	largest := int64(o.largest) << 20
	sizes := append(slices.DeleteFunc(eval.DefaultSizes(), func(n int64) bool { return n >= largest }), largest)
	formats := make([]string, len(o.plots))
	for i, path := range o.plots {
		if formats[i], err = s.plotFormat("--plot", path); err != nil {
			return err
		}
	}
	if err := cmp.Or(s.output("--calibrate", o.calibrate), s.output("--csv", o.csv)); err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	d, err := openCopied(s, set, base)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	base, err = d.calibrationBase(base, o.calibrate)
	if err != nil {
		return err
	}
	measure := eval.TransferOptions{Machine: d.Machine, Compute: d.Space, Peer: d.peer, Sizes: sizes, Repetitions: o.repetitions}
	if err := d.CheckFree(measure.Needs()); err != nil {
		return fmt.Errorf("--largest-mib is %d, which is too large: %w", o.largest, err)
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	p.begin("copies", bytesUnit)
	measure.Progress = func(done, total int64) { p.set("copies", done, total) }
	run := thisRun(s)
	points, interrupted := eval.Transfer(ctx, measure)
	p.end()
	if interrupted != nil && len(points) == 0 {
		return benchError(interrupted)
	}
	if interrupted != nil {
		s.notice(&set.Output, "the sizes that were measured follow; no plot and no calibration")
		formats, o.plots, o.calibrate = nil, nil, ""
	}
	r := &transferResult{TransferResult: eval.TransferResult{Run: run, Machine: d.machine, Points: points}}
	var reads eval.Reads
	if o.calibrate != "" && d.Real() { // emulated devices do not model reads of kernels over links
		if reads, err = eval.MeasureReads(ctx, measure, planning.BlockCopier(d.Enqueuing())); err != nil {
			interrupted = benchError(err)
			s.notice(&set.Output, "the sizes that were measured follow; no calibration")
			o.calibrate = ""
		} else if reads.Host == 0 {
			s.notice(&set.Output, "kernels cannot read host memory here: the calibration has no new rate of that, and experts are copied")
		}
	}
	if o.calibrate != "" && len(d.relays) > 0 && !r.Unpaced() {
		if r.Multipath, interrupted = d.calibrateMultipath(ctx, s, set); interrupted != nil {
			s.notice(&set.Output, "the sizes that were measured follow; no calibration")
			o.calibrate = ""
		}
	}
	written := writeAll(s, res, r, o.files(r, reads, formats, d, base), r.table)
	return errors.Join(written, interrupted)
}

// transferResult is a measurement of copies, with a calibration of several links where there is one.
type transferResult struct {
	eval.TransferResult
	Multipath *multipath.Calibration `json:"multipath,omitempty"`
}

func (r *transferResult) table(w io.Writer) error {
	err := eval.WriteTransferTable(w, &r.TransferResult)
	if err == nil && r.Multipath != nil {
		_, err = io.WriteString(w, r.Multipath.Table())
	}
	return err
}

// calibrateMultipath measures copies over the links of all peers.
func (c *copied) calibrateMultipath(ctx context.Context, s *streams, set *settings) (*multipath.Calibration, error) {
	m := multipath.Options{Machine: c.Machine, GPU: c.Space, Relays: c.relays}
	if !c.Real() {
		m = m.Small()
	}
	if err := c.CheckFree(m.Needs()); err != nil {
		return nil, fmt.Errorf("the calibration of several links: %w; leave --peers out (none) to calibrate one", err)
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	m.Progress = partProgress(p)
	return multipath.Calibrate(ctx, m)
}

// number is the driver's number of a GPU's memory, or that of an emulated GPU.
func (c *copied) number(space string) int {
	for i := range c.Machine.Topology().GPUs {
		switch {
		case device.HBM(i).String() != space:
		case c.Real():
			return c.GPUs[i]
		default:
			return i
		}
	}
	return -1 // no GPU: the calibration is refused
}

// benchLinks measures all links.
func benchLinks(ctx context.Context, s *streams, set *settings, o *transferOptions) error {
	if o.calibrate != "" || o.csv != "" || len(o.plots) > 0 {
		return usagef("--links has no --calibrate, --csv or --plot: leave one out")
	}
	m := multipathOptions{parts: []string{string(multipath.LinksPart)}, size: "64MiB", linkSize: "64MiB", chunkSize: "4MiB", depths: []int{1}, rounds: min(o.repetitions, maxRounds)}
	return benchMultipath(ctx, s, set, &m)
}

// copied are devices whose copies are measured.
type copied struct {
	*devices.Devices
	// peer is the first peer; device.Host: there is none. relays are all of them.
	peer   device.Space
	relays []device.Space
	// machine describes them.
	machine eval.Machine
}

// openCopied opens the devices of a measurement of copies. hardware is what the user named;
// nil: nothing.
func openCopied(s *streams, set *settings, hardware *planner.Hardware) (_ *copied, err error) {
	choice, err := set.Device.ParsePeers()
	if err != nil {
		return nil, err
	}
	d, err := devices.Open(devices.Options{
		Settings: set.Device, Kernels: set.Kernels, Peers: true, Emulate: set.Harvest.AvailabilityTrace != "", Log: set.logger(s.err),
	})
	if err != nil {
		return nil, err
	}
	if !d.Real() {
		if err := set.Device.CheckPeers(len(d.Machine.Topology().GPUs)); err != nil {
			return nil, errors.Join(&usageError{err}, d.Close())
		}
	}
	peers, err := d.Peers(choice)
	if err != nil {
		return nil, errors.Join(fault.Of(fault.ErrConfig, err), d.Close())
	}
	c := &copied{Devices: d, relays: peers, machine: bench.Machine(planning.Facts(d.Machine, d.Space, peers), &set.Device, hardware)}
	if len(peers) > 0 {
		c.peer = peers[0]
	}
	return c, nil
}

// peers are the peer's memory, if there is one.
func (c *copied) peers() []device.Space {
	if c.peer == device.Host {
		return nil
	}
	return []device.Space{c.peer}
}

// named is what the devices are called in a sentence.
func (c *copied) named() string {
	if c.Real() {
		return c.Name()
	}
	return "emulated devices"
}

// calibrationBase is the hardware that a calibration into a file is based on: what the user
// named, or what is known of the devices.
func (c *copied) calibrationBase(named *planner.Hardware, path string) (*planner.Hardware, error) {
	switch {
	case named != nil:
		return named, nil
	case c.machine.Hardware != nil:
		return &c.machine.Hardware.Hardware, nil
	case path != "":
		return nil, usagef("--calibrate: copies do not show compute rates and memory sizes, and those of %s are not known; name similar hardware with --hardware", c.named())
	}
	return nil, nil
}

// files are those that a measurement writes.
func (o *transferOptions) files(r *transferResult, reads eval.Reads, formats []string, d *copied, base *planner.Hardware) []outputFile {
	var files []outputFile
	for i, path := range o.plots {
		files = append(files, outputFile{"--plot", path, func(w io.Writer) error { return eval.PlotTransfer(w, formats[i], &r.TransferResult) }})
	}
	if o.csv != "" {
		files = append(files, outputFile{"--csv", o.csv, func(w io.Writer) error { return eval.WriteTransferCSV(w, &r.TransferResult) }})
	}
	if o.calibrate != "" {
		files = append(files, calibrated(o.calibrate, &r.Run, base, func(c eval.Calibration) (planner.Hardware, error) {
			c.Reads = reads
			h, err := eval.Calibrate(&r.TransferResult, c)
			if err == nil && r.Multipath != nil {
				err = r.Multipath.Put(&h, &r.Machine, d.number)
			}
			return h, err
		}))
	}
	return files
}

// calibrated is the file of a calibration by a run, on a base.
func calibrated(path string, run *eval.Run, base *planner.Hardware, calibrate func(eval.Calibration) (planner.Hardware, error)) outputFile {
	return outputFile{"--calibrate", path, func(w io.Writer) error {
		h, err := calibrate(eval.Calibration{Base: *base, Date: run.Date.Format(time.DateOnly), Version: run.Version})
		if err != nil {
			return err
		}
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(h)
	}}
}
