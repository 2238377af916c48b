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
