package offload

// WithoutReferences has loads from peers let go of their references at once: a negative
// control.
func (t *Tiers) WithoutReferences() {
	r := route{PeerGPU, GPU}
	if h, ok := t.worker.handlers[r].(peerLoad); ok {
		t.worker.handlers[r] = unguardedLoad{h}
	}
}

// unguardedLoad reads peer copies under no reference.
type unguardedLoad struct{ peerLoad }

func (h unguardedLoad) Start(job *Job) (Transfer, []int, error) {
	reads, refused := h.acquire(job)
	for _, r := range reads {
		for i := range r.refs {
			r.refs[i].Release()
		}
		r.refs = nil
	}
	return h.start(job, reads, refused)
}

// ForgetTransfers has the tier in host memory forget what is under way, so that a Reset
// does not wait for it: a negative control.
func (t *Tiers) ForgetTransfers() {
	for _, l := range t.levels {
		if c, ok := l.Memory.(*cpuMemory); ok {
			c.underWay = nil
		}
	}
}
