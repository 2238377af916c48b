package transfer

import (
	"slices"

	"github.com/moeserve/moeserve/device"
)

// LeastSplit is the least that is worth taking over another link. A copy of its own costs
// the host some 10 us and the device 20, in which a peer sends 8 MB: of an expert of 9 MB
// the host's share of 1 MB would bring nothing, and a wave of many gives it whole ones.
const LeastSplit = 4 << 20

// load is what one memory is to send: bytes at a rate.
type load struct{ bytes, rate float64 }

// shift says how many bytes of what each peer is to send should come from the host
// instead, so that all links end at the same time: the host has bytes of its own to
// send, which only it can. Nothing is shifted where a rate is not known, which is 0. The
// result uses the room of moved.
func shift(moved []float64, host load, peers []load) []float64 {
	moved = append(moved[:0], make([]float64, len(peers))...)
	if host.rate <= 0 || slices.ContainsFunc(peers, func(p load) bool { return p.rate <= 0 }) {
		return moved
	}
	// Peers that would end before the others keep all of theirs: moved is -1 there.
	for {
		bytes, rate := host.bytes, host.rate
		for i, p := range peers {
			if moved[i] == 0 {
				bytes, rate = bytes+p.bytes, rate+p.rate
			}
		}
		end := bytes / rate // in seconds
		again := false
		for i, p := range peers {
			if moved[i] == 0 && p.bytes <= end*p.rate {
				moved[i], again = -1, true
			}
		}
		if again {
			continue
		}
		for i, p := range peers {
			if moved[i] == 0 && end > host.bytes/host.rate { // else the host is the last to end by itself
				moved[i] = p.bytes - end*p.rate
			}
			moved[i] = max(moved[i], 0)
		}
		return moved
	}
}

// part is what of so many bytes is taken over another link where moved would be best: at
// least so much, or nothing.
func part(moved float64, least int64) int64 {
	if n := int64(moved) / device.Alignment * device.Alignment; n >= least {
		return n
	}
	return 0
}

// Splits says whether a copy of so many bytes from a peer, with nothing else to copy,
// takes a part of at least LeastSplit from the host, at these rates of their links.
func Splits(bytes int64, host, peer float64) bool {
	moved := shift(nil, load{rate: host}, []load{{float64(bytes), peer}})
	return part(moved[0], LeastSplit) > 0
}
