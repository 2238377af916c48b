package observe

import (
	"github.com/moeserve/moeserve/metrics"
	"github.com/moeserve/moeserve/rebalancer/lending"
)

// Lending is what the KV cache lends to experts. It has a JSON form.
type Lending struct{ lending.Stats }

// Lending reads what is lent; the zero Lending where nothing can be.
func (o *Observer) Lending() Lending {
	if o.p.Lender == nil {
		return Lending{}
	}
	return Lending{o.p.Lender.Stats()}
}

var (
	lentBytes = metrics.NewDesc("moeserve_kv_lent_bytes", "Memory of the KV cache by whose it is: lent to experts, withdrawing (sequences still use it), or returning (experts still do).", "state")
	lentMoves = metrics.NewDesc("moeserve_kv_lent_moves_bytes_total", "Memory of the KV cache that was lent to experts, and that came back to KV blocks.", "to")
)

func (l Lending) collect(to *metrics.Sink) {
	if l.Extents == 0 {
		return
	}
	of := func(extents int64) float64 { return float64(extents * l.ExtentBytes) }
	to.Gauge(lentBytes, of(int64(l.Lent)), "lent")
	to.Gauge(lentBytes, of(int64(l.Withdrawing)), "withdrawing")
	to.Gauge(lentBytes, of(int64(l.Returning)), "returning")
	to.Counter(lentMoves, of(l.ToExperts), "experts")
	to.Counter(lentMoves, of(l.ToKV), "kv")
}
