package main

import (
	"log/slog"
	"maps"
	"slices"

	"github.com/moeserve/moeserve/engine"
	"github.com/moeserve/moeserve/node/checkpoint"
)

// sampling are the parameters of requests that give none.
type sampling struct {
	params engine.Params
	// maxTokens of chats; 0: all that fits.
	maxTokens int
	// given are those that are not the server's own, by name, from the file at path, if there
	// is one.
	given map[string]any
	path  string
}

// defaultSampling reads the defaults that the settings ask for.
func defaultSampling(set *settings) (*sampling, error) {
	g, path, err := checkpoint.Generation(set.Model, set.Serve)
	if err != nil {
		return nil, err
	}
	s := &sampling{params: engine.DefaultParams(), given: g.Values(), path: path}
	p := &s.params
	p.Temperature = 1 // OpenAI's
	for _, v := range []struct{ from, to *float32 }{
		{g.Temperature, &p.Temperature},
		{g.TopP, &p.TopP},
		{g.MinP, &p.MinP},
		{g.RepetitionPenalty, &p.RepetitionPenalty},
	} {
		if v.from != nil {
			*v.to = *v.from
		}
	}
	if g.TopK != nil {
		p.TopK = *g.TopK
	}
	if g.MaxNewTokens != nil {
		s.maxTokens = *g.MaxNewTokens
	}
	return s, nil
}

// log says which defaults are not the server's own.
func (s *sampling) log(to *slog.Logger) {
	if len(s.given) == 0 {
		return
	}
	source := s.path
	if source == "" {
		source = "--override-generation-config"
	}
	args := []any{"source", source}
	for _, name := range slices.Sorted(maps.Keys(s.given)) {
		args = append(args, name, s.given[name])
	}
	to.Info("default sampling parameters", args...)
}
