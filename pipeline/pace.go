package pipeline

import "time"

// pace says of each step whether the copies of its experts end long before they are
// needed, by what the step before took. Steps of about as many rows compute about as long.
type pace struct {
	began time.Duration
	rows  int
	// worked is for how long the latest step that ended well did not wait for experts, of
	// workedRows rows; 0 rows: there was none.
	worked     time.Duration
	workedRows int
	// together says that all experts of a layer are launched at once.
	together bool
}

// hidden is for how much of what a step takes without waiting for experts the links may work
// where what a layer misses has arrived before the layer begins: it is asked for while the
// layer before computes.
const hidden = 0.75

// begin starts a step of so many rows. links is for how long the link that was longest at
// work was so since the step before began.
func (p *pace) begin(now time.Duration, rows int, links time.Duration) {
	like := 4*rows >= 3*p.workedRows && 3*rows <= 4*p.workedRows
	p.together = p.workedRows > 0 && like && links > 0 && links.Seconds() <= hidden*p.worked.Seconds()
	p.began, p.rows = now, rows
}

// fail forgets what steps take, since links were not at work for all of this one: the next
// step's copies may end long after they are needed.
func (p *pace) fail() { p.workedRows = 0 }

// end of the step, in which the compute stream waited for experts for so long.
func (p *pace) end(now, waited time.Duration) {
	p.worked, p.workedRows = now-p.began-waited, p.rows
}
