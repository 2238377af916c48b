package transfer

// TimedEvents is the number of events that there are, in use or not.
func (e *Engine) TimedEvents() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.events)
}

// Hold keeps the engine from doing anything until release is called.
func (e *Engine) Hold() (release func()) {
	e.mu.Lock()
	return e.mu.Unlock
}
