package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Object is a JSON object whose members keep their order.
type Object []Member

// Member is a member of an Object.
type Member struct {
	Name  string
	Value json.RawMessage
}

// ParseObject parses a JSON object. Of members of one name the last value counts, in the place of the first.
func ParseObject(data []byte) (Object, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.Join(errors.New("not a JSON object"), err)
	}
	o := Object{}
	for index := map[string]int{}; d.More(); {
		t, err := d.Token()
		if err != nil {
			return nil, fmt.Errorf("not JSON: %w", err)
		}
		var m Member
		if err := d.Decode(&m.Value); err != nil {
			return nil, fmt.Errorf("not JSON: %w", err)
		}
		m.Name, _ = t.(string)
		if i, ok := index[m.Name]; ok {
			o[i].Value = m.Value
			continue
		}
		index[m.Name] = len(o)
		o = append(o, m)
	}
	if _, err := d.Token(); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	return o, nil
}

// Get returns the value of a member; nil if there is none.
func (o Object) Get(name string) json.RawMessage {
	for _, m := range o {
		if m.Name == name {
			return m.Value
		}
	}
	return nil
}

// Set assigns the value of a member, which keeps its place if it is there already.
func (o *Object) Set(name string, value json.RawMessage) {
	for i := range *o {
		if (*o)[i].Name == name {
			(*o)[i].Value = value
			return
		}
	}
	*o = append(*o, Member{name, value})
}

// JSON returns the object as JSON.
func (o Object) JSON() json.RawMessage {
	b := []byte{'{'}
	for i, m := range o {
		if i > 0 {
			b = append(b, ',')
		}
		name, err := json.Marshal(m.Name)
		if err != nil {
			panic("chat: a name without a JSON form: " + err.Error())
		}
		b = append(b, name...)
		b = append(append(b, ':'), m.Value...)
	}
	return append(b, '}')
}
