package jinja

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"strconv"
)

// Origin says who wrote a text.
type Origin bool

// The origins.
const (
	FromTemplate Origin = false
	FromClient   Origin = true
)

// maxJSONDepth bounds the nesting of decoded values.
const maxJSONDepth = 64

// Decode reads one JSON value as Python's json.loads does: objects keep the order of their keys, integers are exact.
func Decode(b []byte, origin Origin) (Value, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	v, err := decode(d, origin, 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one JSON value")
	}
	return v, nil
}

func decode(d *json.Decoder, origin Origin, depth int) (Value, error) {
	tok, err := d.Token()
	if err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if depth > maxJSONDepth {
		return nil, fmt.Errorf("JSON is nested more than %d deep", maxJSONDepth)
	}
	switch tok := tok.(type) {
	case json.Delim:
		if tok == '[' {
			list := &List{}
			for d.More() {
				v, err := decode(d, origin, depth+1)
				if err != nil {
					return nil, err
				}
				list.Items = append(list.Items, v)
			}
			_, err := d.Token()
			return list, err
		}
		dict := NewDict()
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return nil, fmt.Errorf("not JSON: %w", err)
			}
			v, err := decode(d, origin, depth+1)
			if err != nil {
				return nil, err
			}
			name, _ := key.(string)
			dict.Set(NewText(name, origin), v)
		}
		_, err := d.Token()
		return dict, err
	case json.Number:
		return number(tok.String())
	case string:
		return NewText(tok, origin), nil
	}
	return tok, nil // bool or nil
}

func number(s string) (Value, error) {
	if i, err := strconv.Atoi(s); err == nil {
		return i, nil
	}
	if len(s) > maxDigits {
		return nil, fmt.Errorf("a number of more than %d digits", maxDigits)
	}
	if b, ok := new(big.Int).SetString(s, 10); ok {
		return small(b), nil
	}
	f, _ := strconv.ParseFloat(s, 64) // too large ones are infinite, as Python's
	return f, nil
}
