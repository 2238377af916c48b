package engine

// Turn runs one step, if there is anything to do.
var Turn = (*Engine).runStep

// Asked reports whether a pause was asked for, and neither taken back nor ended since.
var Asked = (*Engine).asked

// Read takes what waits in a job, and says how much that was.
func Read(j *Job) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := len(j.updates) - j.read
	clear(j.updates)
	j.updates, j.read = j.updates[:0], 0
	return n
}

// Held is how many sequences' steps and news an engine still refers to between steps.
func Held(e *Engine) (n int) {
	for _, list := range [][]delivery{e.updates, e.spareUpdates} {
		for _, d := range list[:cap(list)] {
			if d.seq != nil || d.token.Top != nil {
				n++
			}
		}
	}
	for _, c := range e.batch.chunks[:cap(e.batch.chunks)] {
		if c.seq != nil {
			n++
		}
	}
	for _, r := range e.batch.sequences[:cap(e.batch.sequences)] {
		if r.Table != nil || r.Tokens != nil {
			n++
		}
	}
	return n
}

// NoteCanceled has the next step look for requests that were canceled, as their contexts do soon.
func NoteCanceled(e *Engine) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.canceled = true
}
