package experts

import "github.com/moeserve/moeserve/device"

// Link is the way from a memory to the compute GPU.
type Link struct {
	From device.Space
	// BytesPerSecond is what copies have reached lately; before there were any, what
	// the topology says; 0 where that does not say.
	BytesPerSecond float64
}

// Links are the ways into the compute GPU, the host's first.
func (s *Store) Links() []Link {
	var links []Link
	for _, from := range s.fetch.links.From() {
		links = append(links, Link{From: from, BytesPerSecond: s.fetch.links.Rate(from)})
	}
	return links
}
