package experts

import "github.com/moeserve/moeserve/device"

// Link is the path from a memory to the GPU.
type Link struct {
	From device.Space
	// BytesPerSecond is the recently measured rate of copies; before there were any, the
	// topology's rate; 0: unknown.
	BytesPerSecond float64
}

// Links are the paths into the GPU, the host's first.
func (s *Store) Links() []Link {
	var links []Link
	for _, from := range s.fetch.links.From() {
		links = append(links, Link{From: from, BytesPerSecond: s.fetch.links.Rate(from)})
	}
	return links
}
