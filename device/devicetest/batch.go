package devicetest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/moeserve/moeserve/device"
)

// batches copies pieces between all pairs of spaces, each way by one batch, between copies
// that write what it reads and read what it writes.
func batches(s *suite) {
	const pieces, size, rounds = 37, 1000, 5
	for _, pair := range s.batchPairs() {
		on := pair.From
		if on == device.Host {
			on = pair.To
		}
		st, ok := s.stream(on, "batches").(device.BatchCopier)
		if !ok {
			s.Skip("the machine's streams are no device.BatchCopiers")
		}
		in, out := s.alloc(device.Host, pieces*size), s.alloc(device.Host, pieces*size)
		src, dst := s.alloc(pair.From, pieces*size), s.alloc(pair.To, pieces*size)
		piece := func(m device.Memory, i int) device.Range { return m.Range(int64(i*size), size) }
		random := rand.New(rand.NewPCG(uint64(pair.From), uint64(pair.To)))
		var last []int
		for round := range rounds {
			var to, from []device.Range
			last = random.Perm(pieces)
			for i, j := range last {
				to, from = append(to, piece(dst, i)), append(from, piece(src, j))
			}
			to, from = append(to, device.Range{}), append(from, device.Range{}) // nothing
			fill(in.Write(0, pieces*size), uint64(round))
			s.ok(st.Copy(whole(src), whole(in)))
			err := st.CopyBatch(to, from)
			if errors.Is(err, device.ErrNoBatches) {
				s.Skip(err)
			}
			s.ok(err)
			clear(to) // the caller's again
			clear(from)
			s.ok(st.Copy(whole(out), whole(dst)))
			s.ok(st.Synchronize(s.ctx))
			sent, got := in.Read(0, pieces*size), out.Read(0, pieces*size)
			for i, j := range last {
				if !bytes.Equal(got[i*size:][:size], sent[j*size:][:size]) {
					s.Fatalf("%v to %v, round %d: piece %d is not piece %d of the source", pair.From, pair.To, round, i, j)
				}
			}
		}
		s.batchArguments(st, dst, src, in)
		s.ok(st.Close())
	}
}

// batchPairs are pairs of spaces that have a path, and are not both the host.
func (s *suite) batchPairs() []device.Pair {
	var all []device.Pair
	for _, from := range s.m.Topology().Spaces() {
		for _, to := range s.m.Topology().Spaces() {
			if (from != to || from != device.Host) && s.reachable(from, to) {
				all = append(all, device.Pair{From: from, To: to})
			}
		}
	}
	return all
}

// batchArguments: what a batch refuses leaves the stream as it was.
func (s *suite) batchArguments(st device.BatchCopier, dst, src, host device.Memory) {
	a, b := dst.Range(0, 10), src.Range(0, 10)
	for name, c := range map[string]struct{ dst, src []device.Range }{
		"a destination without a source": {[]device.Range{a, dst.Range(20, 10)}, []device.Range{b}},
		"sizes that differ":              {[]device.Range{a}, []device.Range{src.Range(0, 11)}},
		"within host memory":             {[]device.Range{a, host.Range(0, 10)}, []device.Range{b, host.Range(20, 10)}},
		"two ways":                       {[]device.Range{a, src.Range(30, 10)}, []device.Range{b, dst.Range(30, 10)}},
	} {
		if name == "two ways" && dst.Space() == src.Space() {
			continue
		}
		if err := st.CopyBatch(c.dst, c.src); err == nil {
			s.Errorf("a batch with %s is accepted", name)
		} else {
			s.wants(err, "copy", nil)
		}
	}
	s.ok(st.CopyBatch(nil, nil))
	s.ok(st.Synchronize(s.ctx))
	if err := st.CopyBatch([]device.Range{a}, []device.Range{b}); err != nil {
		s.Fatal(fmt.Errorf("after batches that were refused: %w", err))
	}
	s.ok(st.Synchronize(s.ctx))
}
