package models

import (
	"errors"
	"io/fs"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Generation are the sampling parameters that a checkpoint's authors recommend, from its
// generation_config.json; nil where it has none. As with vLLM, do_sample has no effect.
type Generation struct {
	// Temperature from 0 (greedy) to 100; TopP above 0 and at most 1; MinP from 0 to 1;
	// RepetitionPenalty above 0 and at most 100.
	Temperature, TopP, MinP, RepetitionPenalty *float32
	// TopK is 0 for all tokens; MaxNewTokens is at least 1.
	TopK, MaxNewTokens *int
}

// generationFields are what a Generation is read from.
var generationFields = []string{"max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p"}

// generationFile is in checkpoints, beside config.json.
const generationFile = "generation_config.json"

// ReadGeneration reads dir/generation_config.json, whose path it returns; empty without such a
// file.
func ReadGeneration(dir string) (g Generation, path string, err error) {
	path = filepath.Join(dir, generationFile)
	data, err := readConfigFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return g, "", nil
	}
	if err == nil {
		g, err = parseGeneration(newReader(data, path))
	}
	return g, path, err
}

// Override returns g with the fields of a JSON object in place of its own; null removes one. A field
// that g cannot have is an error. source identifies the object in errors.
func (g Generation) Override(data []byte, source string) (Generation, error) {
	r := newReader(data, source)
	for _, field := range slices.Sorted(maps.Keys(r.fields)) {
		if !slices.Contains(generationFields, field) {
			r.fail(field, "is none of %s", strings.Join(generationFields, ", "))
		}
	}
	o, err := parseGeneration(r)
	if err != nil {
		return g, err
	}
	override(r, "temperature", &g.Temperature, o.Temperature)
	override(r, "top_p", &g.TopP, o.TopP)
	override(r, "min_p", &g.MinP, o.MinP)
	override(r, "repetition_penalty", &g.RepetitionPenalty, o.RepetitionPenalty)
	override(r, "top_k", &g.TopK, o.TopK)
	override(r, "max_new_tokens", &g.MaxNewTokens, o.MaxNewTokens)
	return g, nil
}

func override[T any](r *reader, field string, to **T, v *T) {
	if _, ok := r.fields[field]; ok {
		*to = v
	}
}

// Values are the fields that g has, by their names: float64 and int.
func (g Generation) Values() map[string]any {
	values := map[string]any{}
	for field, v := range map[string]*float32{"temperature": g.Temperature, "top_p": g.TopP, "min_p": g.MinP, "repetition_penalty": g.RepetitionPenalty} {
		if v != nil {
			// The shortest number that is this float32: 0.6, not 0.6000000238.
			values[field], _ = strconv.ParseFloat(strconv.FormatFloat(float64(*v), 'g', -1, 32), 64)
		}
	}
	for field, v := range map[string]*int{"top_k": g.TopK, "max_new_tokens": g.MaxNewTokens} {
		if v != nil {
			values[field] = *v
		}
	}
	return values
}

func parseGeneration(r *reader) (Generation, error) {
	var g Generation
	number := func(field string, to **float32, low, high float64, above bool) {
		if !r.has(field) {
			return
		}
		f := r.number(field, low, high)
		if above && float64(f) <= low {
			r.fail(field, "%s: must be above %v and at most %v", brief(r.fields[field]), low, high)
		}
		*to = &f
	}
	whole := func(field string, to **int, low int) {
		n := 0
		if !r.has(field) || !r.decode(field, &n, "a whole number") {
			return
		}
		if n < low || n > math.MaxInt32 {
			r.fail(field, "%d: must be from %d to %d", n, low, math.MaxInt32)
		}
		*to = &n
	}
	number("temperature", &g.Temperature, 0, 100, false)
	number("top_p", &g.TopP, 0, 1, true)
	number("min_p", &g.MinP, 0, 1, false)
	number("repetition_penalty", &g.RepetitionPenalty, 0, 100, true)
	whole("top_k", &g.TopK, -1)
	whole("max_new_tokens", &g.MaxNewTokens, 1)
	if r.err != nil {
		return Generation{}, r.err
	}
	if g.TopK != nil {
		*g.TopK = max(0, *g.TopK) // -1 is all, too
	}
	return g, nil
}
