package multipath

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/moeserve/moeserve/device"
)

// Links are the rates of all links of a machine (the MMA paper's Table 1).
type Links struct {
	// CopyBytes is the size of each copy.
	CopyBytes int64      `json:"copy_bytes"`
	PCIe      []PCIeLink `json:"pcie"`
	// ToGPUs is the sum of all GPUs that copy from the host at once, FromGPUs of all that copy to
	// it, Both of all in both directions, in bytes/s: no copy over several paths can be faster.
	ToGPUs   float64 `json:"all_h2d_bytes_per_s"`
	FromGPUs float64 `json:"all_d2h_bytes_per_s"`
	Both     float64 `json:"all_both_bytes_per_s"`
	// Pairs are the links between GPUs.
	Pairs []PairLink `json:"pairs"`
	// FromPeers is the sum of all other GPUs that copy to the first one at once, ToPeers of its
	// copies to all others; 0: there is none.
	FromPeers float64 `json:"all_peers_to_gpu_bytes_per_s"`
	ToPeers   float64 `json:"gpu_to_all_peers_bytes_per_s"`
}

// PCIeLink is the link of one GPU to the host, rates in bytes/s.
type PCIeLink struct {
	GPU string `json:"gpu"`
	// NUMANode of the GPU, -1 if unknown.
	NUMANode int `json:"numa_node"`
	// H2D and D2H alone, Both the sum of both directions at once.
	H2D  float64 `json:"h2d_bytes_per_s"`
	D2H  float64 `json:"d2h_bytes_per_s"`
	Both float64 `json:"both_bytes_per_s"`
	// SharedH2D and SharedD2H are its parts of all GPUs' copies at once.
	SharedH2D float64 `json:"shared_h2d_bytes_per_s"`
	SharedD2H float64 `json:"shared_d2h_bytes_per_s"`
}

// PairLink is the link from one GPU to another, alone.
type PairLink struct {
	From           string  `json:"from"`
	To             string  `json:"to"`
	BytesPerSecond float64 `json:"bytes_per_s"`
}

// How many copies a flow has: links between GPUs are faster.
const (
	hostCopies = 16
	peerCopies = 64
)

// own is the flow of a GPU's own copies from or to the host; i is its number among the GPUs.
func (r *rig) own(i int, d Direction) (flow, error) {
	gpus := r.o.gpus()
	s := gpus[i]
	f := flow{bytes: r.o.LinkBytes, copies: hostCopies}
	var err error
	if f.stream, err = r.stream(s, string(d)); err != nil {
		return f, err
	}
	// Each GPU has a part of the host's memory, so that no bytes come from a processor's cache
	// because another GPU has just read them.
	part := r.o.share()
	if d == ToGPU {
		f.src, f.dst = r.source.Region(int64(i)*part, part), r.ownBuffer(s, d)
	} else {
		f.src, f.dst = r.ownBuffer(s, d), r.back.Region(int64(i)*part, part)
	}
	return f, nil
}

// owns are the flows of the first n GPUs' own copies.
func (r *rig) owns(n int, ds ...Direction) ([]flow, error) {
	var flows []flow
	for _, d := range ds {
		for i := range n {
			f, err := r.own(i, d)
			if err != nil {
				return nil, err
			}
			flows = append(flows, f)
		}
	}
	return flows, nil
}

// between is the flow from one GPU to another, on a stream of the source, which is faster than one of
// the destination.
func (r *rig) between(from, to device.Space) (flow, error) {
	s, err := r.stream(from, "to "+to.String())
	return flow{stream: s, dst: r.ownBuffer(to, ToGPU), src: r.ownBuffer(from, FromGPU), bytes: r.o.LinkBytes, copies: peerCopies}, err
}

// flowCell measures flows at once.
func (r *rig) flowCell(flows []flow) *cell {
	return &cell{run: func(ctx context.Context) ([]float64, error) { return r.busyRates(ctx, flows) }}
}

// links measures all links.
func (r *rig) links(ctx context.Context) (*Links, error) {
	gpus := r.o.gpus()
	var cells []*cell
	var failed error
	add := func(flows []flow, err error) *cell {
		if err != nil && failed == nil {
			failed = err
		}
		c := r.flowCell(flows)
		cells = append(cells, c)
		return c
	}
	one := func(f flow, err error) *cell { return add([]flow{f}, err) }
	var in, out, both []*cell
	for i := range gpus {
		in = append(in, one(r.own(i, ToGPU)))
		out = append(out, one(r.own(i, FromGPU)))
		a, err := r.own(i, ToGPU)
		b, errB := r.own(i, FromGPU)
		if err == nil {
			err = errB
		}
		both = append(both, add([]flow{a, b}, err))
	}
	allIn, allOut := add(r.owns(len(gpus), ToGPU)), add(r.owns(len(gpus), FromGPU))
	allBoth := add(r.owns(len(gpus), directions...))
	var pairs []*cell
	var fromPeers, toPeers []flow
	for i, from := range gpus {
		for j, to := range gpus {
			if i == j {
				continue
			}
			f, err := r.between(from, to)
			pairs = append(pairs, one(f, err))
			if j == 0 {
				// Sources that copy to one GPU at once write parts of its memory of their own.
				f.dst = r.local.Region(int64(i)*r.o.share(), r.o.share())
				fromPeers = append(fromPeers, f)
			}
			if i == 0 {
				toPeers = append(toPeers, f)
			}
		}
	}
	var peersIn, peersOut *cell
	if len(r.o.Relays) > 0 {
		peersIn, peersOut = add(fromPeers, nil), add(toPeers, nil)
	}
	if failed != nil {
		return nil, failed
	}
	if err := r.measure(ctx, LinksPart, r.o.Rounds, cells); err != nil {
		return nil, err
	}
	l := &Links{CopyBytes: r.o.LinkBytes, ToGPUs: sum(allIn.medians()), FromGPUs: sum(allOut.medians()), Both: sum(allBoth.medians())}
	for i, s := range gpus {
		info, _ := r.o.Machine.Topology().Info(s)
		l.PCIe = append(l.PCIe, PCIeLink{
			GPU: s.String(), NUMANode: info.NUMANode, H2D: in[i].median(0), D2H: out[i].median(0), Both: sum(both[i].medians()),
			SharedH2D: allIn.median(i), SharedD2H: allOut.median(i),
		})
		for _, to := range gpus {
			if to != s {
				l.Pairs = append(l.Pairs, PairLink{From: s.String(), To: to.String(), BytesPerSecond: pairs[len(l.Pairs)].median(0)})
			}
		}
	}
	if peersIn != nil {
		l.FromPeers, l.ToPeers = sum(peersIn.medians()), sum(peersOut.medians())
	}
	return l, nil
}

// table writes the rates for a person.
func (l *Links) table(b *strings.Builder) {
	fmt.Fprintf(b, "links, GB/s (10^9 bytes/s), copies of %s queued back to back\n", size(l.CopyBytes))
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "PCIe\tNUMA node\th2d\td2h\tboth directions\th2d, all GPUs at once\td2h, all GPUs at once\t")
	for _, p := range l.PCIe {
		node := "?"
		if p.NUMANode >= 0 {
			node = fmt.Sprint(p.NUMANode)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", p.GPU, node, gb(p.H2D), gb(p.D2H), gb(p.Both), gb(p.SharedH2D), gb(p.SharedD2H))
	}
	fmt.Fprintf(w, "all\t\t\t\t%s\t%s\t%s\t\n", gb(l.Both), gb(l.ToGPUs), gb(l.FromGPUs))
	w.Flush() //nolint:errcheck // writing to memory does not fail
	if len(l.Pairs) == 0 {
		b.WriteString("\n")
		return
	}
	b.WriteString("\nbetween GPUs, each pair alone\n")
	w = tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "from, to\t")
	for _, p := range l.PCIe {
		fmt.Fprintf(w, "%s\t", p.GPU)
	}
	fmt.Fprintln(w)
	next := 0
	for _, from := range l.PCIe {
		fmt.Fprintf(w, "%s\t", from.GPU)
		for _, to := range l.PCIe {
			if to == from {
				fmt.Fprint(w, "–\t")
				continue
			}
			fmt.Fprintf(w, "%s\t", gb(l.Pairs[next].BytesPerSecond))
			next++
		}
		fmt.Fprintln(w)
	}
	w.Flush() //nolint:errcheck // as above
	fmt.Fprintf(b, "all others to %s at once: %s, %s to all others: %s\n\n", l.PCIe[0].GPU, gb(l.FromPeers), l.PCIe[0].GPU, gb(l.ToPeers))
}
