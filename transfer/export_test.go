package transfer

// TimedEvents is the number of events that there are, in use or not.
func (e *Engine) TimedEvents() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.events)
}
