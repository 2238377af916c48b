package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/device"
	"github.com/moeserve/moeserve/eval/multipath"
)

// maxRounds and maxBuffers bound flags of bench multipath.
const (
	maxRounds  = 1000
	maxBuffers = 64
)

// multipathOptions are the flags of bench multipath alone.
type multipathOptions struct {
	largest        string
	parts          []string
	size, linkSize string
	chunkSize      string
	chunkSizes     []string
	depths         []int
	rounds         int
	plots          string
	// compete: the command is a competitor of another one, see multipath.Compete.
	compete bool
}

// competitorEnds is how long a competitor that is to end may take before it is killed.
const competitorEnds = 20 * time.Second

// competitorBytes is the size of a competitor's copies: much less than what is measured.
const competitorBytes = 16 << 20

func newBenchMultipath(s *streams) *cobra.Command {
	var o multipathOptions
	cmd := &cobra.Command{
		Use:   "multipath",
		Short: "Measure copies from and to the host over the links of several GPUs",
		Long: `Measure copies between host memory and the GPU that computes that use the PCIe links
of the --peers too, through their memory: the tables and figures of the MMA paper
("MultiPath Transfer Engine").

--parts names what is measured; all is the default:

` + partsHelp() + `

What is compared takes turns, and the median over the --rounds counts. Copies over several
paths (parts static, relay, sizes, gpus, chunks, threshold) are checked once, byte by byte.
A line "target" at the end says of each figure that is to be reached whether it was.`,
		Example: `  moeserve bench multipath --device cuda --peers 1 --json out.json --plots .
  moeserve bench multipath --device cuda --peers 1,2,3 --parts links,static
  moeserve bench multipath --parts links,roots \
      --emulate virtual,nodata,gpus=4,pcie=55GB/s,hostroot=99GB/s,nvlink=395GB/s`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			if o.compete {
				return compete(cmd.Context(), s, set)
			}
			return benchMultipath(cmd.Context(), s, set, &o)
		},
	}
	addSettings(cmd.Flags(), configs.For("bench multipath"))
	f := cmd.Flags()
	f.StringSliceVar(&o.parts, "parts", nil, "comma-separated `NAMES` of what is measured; default: all")
	f.StringVar(&o.size, "copy-size", "", "`SIZE` of a copy, of parts that have one size; default: 1GiB, 64MiB on emulated devices with data")
	f.StringVar(&o.largest, "largest-size", "", "largest `SIZE` of part sizes; default: 8GiB on GPUs, --copy-size on emulated devices")
	f.StringVar(&o.linkSize, "link-copy-size", "", "`SIZE` of the copies of a single link, which are queued; default: 64MiB, 8MiB on emulated devices with data")
	f.StringVar(&o.chunkSize, "static-chunk-size", "4MiB", "`SIZE` of the chunks of a static split")
	f.StringSliceVar(&o.chunkSizes, "chunk-sizes", nil, "comma-separated `SIZES` of chunks that are compared; default: 1MiB to 16MiB, to 4MiB on emulated devices with data")
	f.IntSliceVar(&o.depths, "depths", []int{1, 2, 3, 4}, "comma-separated `NUMBERS` of chunks in flight that are compared")
	f.IntVar(&o.rounds, "rounds", 5, "`NUMBER` of measurements whose median counts")
	f.Var((*pathValue)(&o.plots), "plots", "draw each figure to an SVG in a directory")
	f.BoolVar(&o.compete, "compete", false, "copy over the GPU's link as standard input says, beside another bench multipath")
	f.Lookup("compete").Hidden = true
	return cmd
}

// partsHelp lists the parts with what each is.
func partsHelp() string {
	var b strings.Builder
	for _, p := range multipath.Parts {
		fmt.Fprintf(&b, "  %-10s %s\n", p, p.About())
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// options reads the flags.
func (o *multipathOptions) options() (m multipath.Options, err error) {
	for _, name := range o.parts {
		if !slices.Contains(multipath.Parts, multipath.Part(name)) {
			var names []string
			for _, p := range multipath.Parts {
				names = append(names, string(p))
			}
			return m, usagef("--parts %s: no such part%s; known are %s", name, configs.DidYouMean(name, names), strings.Join(names, ", "))
		}
		if slices.Contains(m.Parts, multipath.Part(name)) {
			return m, usagef("--parts has %s twice", name)
		}
		m.Parts = append(m.Parts, multipath.Part(name))
	}
	for flag, x := range map[string]struct {
		text string
		to   *int64
	}{"--copy-size": {o.size, &m.Bytes}, "--link-copy-size": {o.linkSize, &m.LinkBytes}, "--static-chunk-size": {o.chunkSize, &m.ChunkBytes}, "--largest-size": {o.largest, &m.Largest}} {
		if x.text == "" {
			continue
		}
		if *x.to, err = parseCopySize(flag, x.text); err != nil {
			return m, err
		}
	}
	for _, text := range o.chunkSizes {
		n, err := parseCopySize("--chunk-sizes", text)
		if err != nil {
			return m, err
		}
		m.Chunks = append(m.Chunks, n)
	}
	if len(o.depths) == 0 || slices.Min(o.depths) < 1 || slices.Max(o.depths) > maxBuffers {
		return m, usagef("--depths %v: must be numbers from 1 to %d", o.depths, maxBuffers)
	}
	if o.rounds < 1 || o.rounds > maxRounds {
		return m, usagef("--rounds is %d: must be from 1 to %d", o.rounds, maxRounds)
	}
	m.Depths, m.Rounds = o.depths, o.rounds
	if o.plots != "" {
		if info, err := os.Stat(o.plots); err != nil || !info.IsDir() {
			return m, usagef("--plots %s: no such directory; make it first", o.plots)
		}
	}
	return m, nil
}

// parseCopySize reads the size of a copy: whole cache lines, so that no word is divided.
func parseCopySize(flag, text string) (int64, error) {
	n, err := configs.ParseBytes(text)
	switch {
	case err != nil:
		return 0, usagef("%s: %w", flag, err)
	case n < 64 || n%64 != 0 || n > maxMiB<<20:
		return 0, usagef("%s %s: must be a multiple of 64 bytes, at most %d MiB", flag, text, maxMiB)
	}
	return n, nil
}

func benchMultipath(ctx context.Context, s *streams, set *settings, o *multipathOptions) (err error) {
	hardware, err := readHardware(set.Plan.Hardware)
	if err != nil {
		return err
	}
	m, err := o.options()
	if err != nil {
		return err
	}
	res, err := s.openResult(set.Output.JSON)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, res.close()) }()
	d, err := openCopied(s, set, hardware)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if len(d.relays) == 0 && !slices.Equal(m.Parts, []multipath.Part{multipath.LinksPart}) {
		return usagef("bench multipath needs a second GPU: name one with --peers, or measure --parts %s", multipath.LinksPart)
	}
	r := &multipath.Result{Run: thisRun(s), Machine: d.machine}
	interrupted := d.multipath(ctx, s, set, m, r)
	if interrupted != nil && r.Empty() {
		return benchError(interrupted)
	}
	if interrupted != nil {
		s.notice(&set.Output, "the parts that were measured follow")
	}
	var files []outputFile
	if o.plots != "" {
		for name, chart := range r.Figures() {
			files = append(files, outputFile{"--plots", filepath.Join(o.plots, name+".svg"), func(w io.Writer) error { return chart.Write(w, "svg") }})
		}
	}
	written := writeAll(s, res, r, files, func(w io.Writer) error { return multipath.WriteTable(w, r) })
	return errors.Join(written, interrupted)
}

// multipath measures parts on the devices.
func (c *copied) multipath(ctx context.Context, s *streams, set *settings, m multipath.Options, r *multipath.Result) error {
	m.Machine, m.GPU, m.Relays, m.CPUTime = c.Machine, c.Space, c.relays, processorTime
	if !c.Real() {
		m = emulatedSizes(m, c.Machine.Capabilities().KeepsData)
	}
	if err := c.CheckFree(m.Needs()); err != nil {
		return fmt.Errorf("the copies are too large; give a smaller --copy-size or --largest-size: %w", err)
	}
	p := s.progress(&set.Output, false)
	defer p.end()
	m.Progress = partProgress(p)
	if c.Real() {
		m.Others = func(ctx context.Context, gpu device.Space) (multipath.Competitor, error) {
			i, _ := gpu.GPU()
			return startCompetitor(ctx, s, "--device", "cuda", "--gpu", strconv.Itoa(i), "--host-memory-gib", fmt.Sprint(set.Device.HostMemoryGiB))
		}
	}
	return multipath.Measure(ctx, m, r)
}

// startCompetitor starts this program as a competitor, on the devices that flags name.
func startCompetitor(ctx context.Context, s *streams, flags ...string) (*multipath.Remote, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, append([]string{"bench", "multipath", "--compete", "--peers", "none"}, flags...)...)
	cmd.Stderr = s.err
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &multipath.Remote{Commands: in, Answers: out, Wait: func() error {
		defer time.AfterFunc(competitorEnds, func() { cmd.Process.Kill() }).Stop() //nolint:errcheck // it has ended by itself
		return cmd.Wait()
	}}, nil
}

// compete copies as standard input says.
func compete(ctx context.Context, s *streams, set *settings) (err error) {
	d, err := openCopied(s, set, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	return multipath.Compete(ctx, multipath.Options{Machine: d.Machine, GPU: d.Space, LinkBytes: competitorBytes}, s.in, s.out)
}

// emulatedSizes fills in the sizes of emulated devices that the flags leave open: small ones where the
// copies are this CPU's.
func emulatedSizes(m multipath.Options, data bool) multipath.Options {
	usual := m.EnsureDefaults()
	if data {
		usual = m.Small()
	}
	if m.Bytes == 0 {
		m.Bytes = usual.Bytes
	}
	if m.Largest == 0 {
		m.Largest = m.Bytes
	}
	if m.LinkBytes == 0 {
		m.LinkBytes = usual.LinkBytes
	}
	if len(m.Chunks) == 0 {
		m.Chunks = usual.Chunks
	}
	return m
}

// partProgress shows the progress of each part of a measurement.
func partProgress(p *progress) func(part multipath.Part, done, total int) {
	var now multipath.Part
	return func(part multipath.Part, done, total int) {
		if part != now {
			now = part
			p.begin(string(part), "measurements")
		}
		p.set(string(part), int64(done), int64(total))
	}
}

// processorTime is what all threads of this process have taken of processors, in user mode and in the
// kernel.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
