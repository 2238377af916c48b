package engine

// Turn runs one step, if there is anything to do.
var Turn = (*Engine).turn

// Read takes what waits in a job, and says how much that was.
func Read(j *Job) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := len(j.news) - j.read
	clear(j.news)
	j.news, j.read = j.news[:0], 0
	return n
}

// Held is how many sequences' steps and news an engine still refers to between steps.
func Held(e *Engine) (n int) {
	for _, list := range [][]delivery{e.pending, e.spare} {
		for _, d := range list[:cap(list)] {
			if d.of != nil || d.token.Top != nil {
				n++
			}
		}
	}
	for _, c := range e.chunks[:cap(e.chunks)] {
		if c.of != nil {
			n++
		}
	}
	for _, r := range e.rows[:cap(e.rows)] {
		if r.Table != nil || r.Tokens != nil {
			n++
		}
	}
	return n
}
