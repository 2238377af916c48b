package schema_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/moeserve/moeserve/models/grammar"
	"github.com/moeserve/moeserve/models/grammar/schema"
	"github.com/moeserve/moeserve/tools/racedetector"
)

func TestCompile(t *testing.T) {
	for _, c := range []struct {
		schema  string
		yes, no []string
	}{
		{
			`{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}`,
			[]string{`{"a":"x"}`, `{"a": "x", "b": 1}`, "{\n  \"a\": \"\\u00e9\\n\",\n  \"b\": -12\n}"},
			[]string{`{}`, `{"b":1}`, `{"a":1}`, `{"a":"x","c":1}`, `{"b":1,"a":"x"}`, `{"a":"x",}`, `{"a":"x"} `, "{\"a\":\"\n\"}", `{"a":"\ud800"}`},
		},
		{`{"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "boolean"}}`, []string{`{"a":1,"b":true}`, `{"ab":false,"aa":true}`, `{}`}, []string{`{"b":1}`, `{"b":true,"a":1}`, `{"b":true,"\u0061":false}`}},
		{`{"type": "array", "items": {"enum": ["x", 2]}, "minItems": 1, "maxItems": 3}`, []string{`["x"]`, `["x",2, 2]`}, []string{`[]`, `["y"]`, `["x",2,2,2]`}},
		{`{"type": "array", "prefixItems": [{"type": "null"}, {"type": "string"}], "items": false}`, []string{`[]`, `[null]`, `[null,"x"]`}, []string{`["x"]`, `[null,"x",1]`}},
		// Tuples of draft 7, as pydantic 1 and zod 3 write them.
		{`{"type": "array", "items": [{"type": "null"}, {"type": "string"}], "additionalItems": false}`, []string{`[]`, `[null]`, `[null,"x"]`}, []string{`["x"]`, `[null,"x",1]`}},
		{`{"items": [{"type": "null"}], "minItems": 2, "additionalItems": {"type": "integer"}}`, []string{`[null,1]`, `[null,1,2]`}, []string{`[null]`, `[null,null]`, `[1,1]`}},
		{`{"type": "array", "items": {"type": "integer"}, "additionalItems": false}`, []string{`[]`, `[1,2]`}, []string{`[null]`}},
		// Records of zod.
		{`{"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}`, []string{`{}`, `{"a":1,"":2}`}, []string{`{"a":"x"}`, `[]`}},
		{`{"propertyNames": {"title": "Key"}, "additionalProperties": {"type": "null"}}`, []string{`{"a":null}`}, []string{`{"a":1}`}},
		// Unions of pydantic whose tag has a default.
		{
			`{"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}}, "$defs": {
				"cat": {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat", "type": "string"}, "lives": {"type": "integer"}}, "required": ["lives"]},
				"dog": {"type": "object", "properties": {"kind": {"const": "dog", "default": "dog", "type": "string"}, "name": {"type": "string"}}, "required": ["name"]}}}`,
			[]string{`{"kind":"cat","lives":9}`, `{"kind":"dog","name":"x"}`},
			[]string{`{"lives":9}`, `{"name":"x"}`, `{"kind":"dog","lives":9}`, `{}`},
		},
		{`{"type": "integer", "minimum": -3, "exclusiveMaximum": 120}`, []string{"-3", "0", "7", "119", "99"}, []string{"-4", "120", "1.0", "01"}},
		{`{"type": "number", "minimum": 0.5, "maximum": 2.25}`, []string{"0.5", "0.51", "1", "1.999", "2", "2.2", "2.25", "2.250"}, []string{"0.49", "0", "2.26", "2.251", "-1", "3"}},
		{`{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}`, []string{"0.1", "0.001", "0.999"}, []string{"0", "0.0", "1", "1.0", "-0.5"}},
		// Of these, as float64, none is the bound.
		{`{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 5}`, []string{"4.99999999999999", "0.00000000000001"}, []string{"4.99999999999999999", "4.9999999999999999"}},
		{`{"type": "number", "exclusiveMinimum": 123456789, "maximum": 123456790}`, []string{"123456789.000001", "123456789.999999", "123456790"}, []string{"123456789.000000001", "123456789.00000001"}},
		{`{"type": "number", "not": {"const": -2.5}}`, []string{"-2.49999999999999", "-2.50000000000001"}, []string{"-2.49999999999999999", "-2.50000000000000001"}},
		{`{"type": "number", "not": {"type": "integer"}, "minimum": -20}`, []string{"0.5", "-19.05", "1.00000000000001", "99999999999999.5", "1.50"}, []string{"1", "1.0", "1.99999999999999999", "1.00000000000000001", "100000000000000000.5", "-0.0"}},
		{`{"type": "number", "maximum": -1.5}`, []string{"-1.5", "-2", "-1.51", "-100.25"}, []string{"-1.4", "0", "1"}},
		{`{"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 700}`, []string{"0", "7", "-14", "693", "700"}, []string{"1", "-21", "707", "70.0", "-0", "00"}},
		{`{"type": "integer", "multipleOf": 2.5}`, []string{"0", "5", "-10", "999999999999999995"}, []string{"2.5", "2", "-4"}},
		{`{"type": "number", "multipleOf": 0.05, "minimum": 0.1, "exclusiveMaximum": 12}`, []string{"0.1", "0.10", "0.15", "3", "3.0", "10.05", "11.95"}, []string{"0.05", "0", "0.12", "12", "12.00", "3.001", "1e0", ".5", "00.5"}},
		{`{"type": "number", "multipleOf": 0.01, "maximum": -0.5}`, []string{"-0.5", "-0.51", "-12"}, []string{"-0.49", "0", "0.5", "-0.505"}},
		{`{"allOf": [{"multipleOf": 0.4}, {"multipleOf": 6, "type": ["number", "string"]}]}`, []string{"0", "6", "-12", `"x"`}, []string{"0.4", "1.2", "4", "null"}},
		{`{"enum": [3, 4, 4.5, "x", 9], "multipleOf": 1.5, "type": "number"}`, []string{"3", "4.5", "9"}, []string{"4", `"x"`}},
		{`{"type": "string", "minLength": 2, "maxLength": 3}`, []string{`"é\n"`, `"abc"`, `"\u00e9ab"`, `"😀😀"`}, []string{`"a"`, `"abcd"`}},
		{`{"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}`, []string{`"AB-1"`}, []string{`"AB-"`, `"xAB-1"`}},
		{`{"type": "string", "pattern": "a\"b"}`, []string{`"a\"b"`, `"xa\"by"`}, []string{`"ab"`}},
		{`{"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "minLength": 2, "maxLength": 5}`, []string{`"ab"`, `"a-b-c"`, `"abcde"`}, []string{`"a"`, `"abcdef"`, `"a-b-"`, `"-ab"`}},
		{`{"type": "string", "pattern": "x.y", "maxLength": 4}`, []string{`"xéy"`, `"xx😀y"`, `"x\"y\n"`, `"\u00e9x y"`}, []string{`"xy"`, `"aaxby"`, `"x\ny"`, `"\u00e9x yz"`}},
		{`{"type": "string", "pattern": "\\S\n", "minLength": 4}`, []string{`"aab\n"`, `"b\n\\\""`}, []string{`"ab\n"`, `"   \n"`}},
		{`{"type": "string", "pattern": "^[A-Z]{2,3}$", "maxLength": 100000}`, []string{`"AB"`, `"ABC"`}, []string{`"ABCD"`, `"A"`}},
		{`{"type": "string", "pattern": "[0-9]", "minLength": 3, "allOf": [{"pattern": "[a-z]"}, {"pattern": "^\\S*$", "maxLength": 4}]}`, []string{`"a12"`, `"ü0z"`, `"1\"a\\"`}, []string{`"123"`, `"abc"`, `"a1"`, `"a1 b"`, `"ab123"`}},
		{`{"type": "string", "format": "date", "pattern": "^2", "allOf": [{"pattern": "-29$"}]}`, []string{`"2024-02-29"`}, []string{`"1996-02-29"`, `"2024-02-28"`, `"2023-02-29"`}},
		{`{"type": "string", "format": "hostname", "minLength": 3, "maxLength": 7}`, []string{`"a.b"`, `"abc-d.e"`}, []string{`"ab"`, `"abcdefgh"`, `"a.-"`}},
		{`{"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^a{5}$", "maxLength": 4}]}`, []string{`null`}, []string{`"aaaaa"`, `"aaaa"`}},
		{`{"enum": ["ab", "aéc", "ABC", "abcd", 1], "pattern": "^[a-zé]+$", "minLength": 3, "allOf": [{"maxLength": 3}]}`, []string{`"aéc"`, `1`}, []string{`"ab"`, `"ABC"`, `"abcd"`}},
		{`{"enum": ["a", "b"], "pattern": "a", "maxLength": 100000}`, []string{`"a"`}, []string{`"b"`}},
		{`{"type": "string", "format": "date"}`, []string{`"2024-02-29"`, `"2023-12-31"`}, []string{`"2023-02-29"`, `"2023-13-01"`, `"1900-02-29"`}},
		{`{"type": "string", "format": "uri-reference", "minLength": 1}`, []string{`"x"`}, []string{`""`}},
		{
			`{"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}`,
			[]string{`"https://example.com"`, `"http://127.0.0.1:8000/a/%20b?q=1&r=/#top"`, `"urn:isbn:0451450523"`, `"mailto:a.b@example.com"`, `"file:///etc/hosts"`},
			[]string{`""`, `"x"`, `"/a"`, `"http://"`, `"http://a b"`, `"http://1.2.3/"`, `"http://a/%2"`, `"http://a:/"`, `"https://a/` + strings.Repeat("b", 512) + `"`},
		},
		{`{"format": "uuid4"}`, []string{`"0b9A6a6e-6c1d-4c3b-9a1e-2f1d5c8e7a90"`}, []string{`"0b9a6a6e-6c1d-1c3b-9a1e-2f1d5c8e7a90"`, `"0b9a6a6e-6c1d-4c3b-7a1e-2f1d5c8e7a90"`}},
		{`{"format": "ipvanyaddress"}`, []string{`"::1"`, `"10.0.0.1"`}, []string{`"10.0.0"`}},
		{`{"format": "email"}`, []string{`"a@example.com"`}, []string{`"a@localhost"`}},
		{`{"format": "date"}`, []string{`"0004-02-29"`, `"2000-02-29"`}, []string{`"0000-01-01"`, `"1900-02-29"`, `"0000-02-29"`}},
		{`{"type": "integer", "minimum": 1, "exclusiveMinimum": true, "maximum": 4, "exclusiveMaximum": false}`, []string{`2`, `4`}, []string{`1`, `5`}},
		{`{"anyOf": [{"type": "string"}, {"type": "null"}], "title": "x", "default": null}`, []string{`"x"`, `null`}, []string{`1`}},
		{`{"type": "string", "nullable": true}`, []string{`"x"`, `null`}, []string{`1`}},
		{`{"type": ["integer", "null"]}`, []string{`1`, `null`}, []string{`1.5`}},
		{`{"const": {"a": [1, "x"]}}`, []string{`{"a":[1,"x"]}`}, []string{`{}`}},
		{`{"enum": [1, "a", null, 1000], "type": "integer", "maximum": 10}`, []string{`1`}, []string{`"a"`, `1000`, `null`}},
		{
			`{"$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": false}}, "$ref": "#/$defs/node"}`,
			[]string{`{"v":1,"next":{"v":2,"next":null}}`},
			[]string{`{"v":1}`, `{"v":1,"next":{}}`},
		},
		{`{"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"a": {"minimum": 5}, "b": {"type": "null"}}}]}`, []string{`{"a":5}`, `{"a":7,"b":null}`}, []string{`{"a":4}`, `{}`}},
		{
			`{"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind"]}, {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]}]}`,
			[]string{`{"kind":"a","x":1}`, `{"kind":"b"}`},
			[]string{`{"kind":"b","x":1}`, `{"kind":"c"}`},
		},
		{`{"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2}`, []string{`{"a":1}`, `{"a":1, "b":2}`}, []string{`{}`, `{"a":1,"b":2,"c":3}`, `{"a":"x"}`}},
		{`{"type": "object", "maxProperties": 0}`, []string{`{}`, `{ }`}, []string{`{"a":1}`}},
		{`{"properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 1, "maxProperties": 2}`, []string{`{"a":1}`, `{"a":1,"b":2}`}, []string{`{}`, `{"b":1}`}},
		{`{"anyOf": [{"type": "null"}, {"required": ["a", "b"], "maxProperties": 1}]}`, []string{`null`}, []string{`{"a":1,"b":1}`}},
		{`{"type": "object"}`, []string{`{}`, `{"a":{"b":[1,{"c":null}]}}`}, []string{`[]`}},
		{`true`, []string{`1`, `"x"`, `{"a":[]}`, `-1.5e+3`}, []string{``, `nul`}},
		{`{"required": ["a"], "type": "object"}`, []string{`{"a":1}`, `{"a":1,"b":2}`}, []string{`{}`, `{"b":1}`}},
		// Fields of zod and pydantic that are not to have a value, or that ask for others.
		{`{"properties": {"a": {"not": {}}, "b": {"type": "null"}}}`, []string{`{}`, `{"b":null}`}, []string{`{"a":1}`}},
		{`{"type": "string", "not": {"enum": ["a", "b\"", "\u2028"]}}`, []string{`""`, `"ab"`, `"b"`}, []string{`"a"`, `"b\""`, `"\u0061"`, "\"\u2028\"", `"\u2028"`, `1`}},
		{`{"type": "string", "minLength": 1, "not": {"pattern": "^\\s|\\s$"}}`, []string{`"a b"`, `"\""`}, []string{`" a"`, `"a\n"`, `""`, `"\u0020a"`}},
		{`{"type": ["number", "null"], "not": {"enum": [0, 2.5]}}`, []string{`1`, `2.51`, `-3`, `null`}, []string{`0`, `0.0`, `2.50`, `"x"`}},
		{
			`{"type": "object", "properties": {"kind": {"enum": ["box", "ball"]}, "side": {"type": "integer"}, "radius": {"type": "integer"}}, "required": ["kind"],
				"if": {"properties": {"kind": {"const": "box"}}}, "then": {"required": ["side"]}, "else": {"required": ["radius"], "properties": {"side": false}}}`,
			[]string{`{"kind":"box","side":1}`, `{"kind":"ball","radius":2}`, `{"kind":"box","side":1,"radius":2}`},
			[]string{`{"kind":"box","radius":1}`, `{"kind":"ball","side":2}`, `{"kind":"ball"}`, `{"kind":"ball","side":1,"radius":2}`},
		},
		{
			`{"type": "object", "properties": {"id": {"type": "integer"}, "mail": {"type": "string"}}, "oneOf": [{"required": ["id"]}, {"required": ["mail"]}]}`,
			[]string{`{"id":1}`, `{"mail":"x"}`},
			[]string{`{}`, `{"id":1,"mail":"x"}`},
		},
		{
			`{"type": "object", "properties": {"card": {"type": "integer"}, "street": {"type": "null"}}, "dependentRequired": {"card": ["street"]}}`,
			[]string{`{}`, `{"street":null}`, `{"card":1,"street":null}`},
			[]string{`{"card":1}`},
		},
		{`{"enum": [{"card": 1}, {"card": 1, "street": null}, {}], "dependentRequired": {"card": ["street"]}}`, []string{`{"card":1,"street":null}`, `{}`}, []string{`{"card":1}`}},
		// Numbers with many digits are equal, and whole, by what they are.
		{`{"oneOf": [{"const": 1e20}, {"enum": [10e19, 2]}]}`, []string{`2`}, []string{`1e20`, `10e19`}},
		{`{"enum": [1e50, 3, 25e-1, 1e-50], "not": {"type": "integer"}}`, []string{`25e-1`, `1e-50`}, []string{`1e50`, `3`}},
		{`{"allOf": [{"enum": [{"a": [1e50, 0], "b": "x"}]}, {"const": {"b": "x", "a": [1.0e+50, -0.0]}}]}`, []string{`{"a":[1e50,0],"b":"x"}`}, nil},
		// A name that looks like the place of another schema.
		{
			`{"type": "object", "if": {"properties": {"a": {"const": 1}, "a (not)": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}, "properties": {"b": {"type": "null"}}}`,
			[]string{`{"b":null,"a":1}`, `{"a":2}`, `{}`},
			[]string{`{"a":1}`},
		},
		// Values of an enum beside keywords whose own texts have another order, or another spelling, or that need few items.
		{
			`{"enum": [{"b": 1, "a": {"y": 2, "x": 3}}, {"b": "x"}], "properties": {"a": {"properties": {"x": {"minimum": 1}, "y": {}}}, "b": {"type": "integer"}}}`,
			[]string{`{"b":1,"a":{"y":2,"x":3}}`},
			[]string{`{"b":"x"}`},
		},
		{`{"enum": [1.5e-3, 12345678901234567890, 0.12345678901234567890, -1e-3, 7], "minimum": 0, "not": {"const": 7.0}}`, []string{`1.5e-3`, `12345678901234567890`, `0.12345678901234567890`}, []string{`-1e-3`, `7`}},
		{`{"enum": [1.5e-3, 2e-3, 1e20], "multipleOf": 0.001}`, []string{`2e-3`, `1e20`}, []string{`1.5e-3`}},
		{`{"enum": [[1, 2], [1, 1.0], [2, "a"]], "uniqueItems": true, "contains": {"const": 2}, "allOf": [{"contains": {"type": "integer"}, "minContains": 2}]}`, []string{`[1,2]`}, []string{`[1,1]`, `[2,"a"]`}},
		{`{"enum": [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "ccc": 2}], "minProperties": 2, "propertyNames": {"maxLength": 2}}`, []string{`{"a":1,"b":2}`}, []string{`{"a":1}`, `{"a":1,"ccc":2}`}},
		{`{"$id": "http://example.com/a", "properties": {"a": {"$id": "#a", "items": {"$ref": "#/$defs/b"}}, "$id": {"type": "null"}}, "$defs": {"b": {"type": "null"}}}`, []string{`{"a":[null],"$id":null}`}, []string{`{"a":[1]}`}},
		// Sets and dictionaries of pydantic, records of zod.
		{`{"type": "array", "items": {"enum": ["x", "y", 1]}, "uniqueItems": true, "minItems": 1}`, []string{`["x"]`, `["y", "x"]`, `[1,"x","y"]`}, []string{`[]`, `["x","x"]`, `["x",1,"x"]`, `["z"]`}},
		{`{"type": "array", "items": {"type": "string"}, "uniqueItems": true, "maxItems": 1}`, []string{`["x"]`, `[]`}, []string{`["x","y"]`}},
		{`{"type": "object", "patternProperties": {"^x-": {"type": "integer"}}}`, []string{`{}`, `{"x-a": 1, "x-\"": 2}`}, []string{`{"x-a":"b"}`, `{"y":1}`, `{"\u0078-":1}`}},
		{
			`{"type": "object", "properties": {"n1": {"minimum": 5}, "s": {"type": "string"}}, "patternProperties": {"^n": {"type": "integer"}, "1$": {"maximum": 9}}, "additionalProperties": {"type": "null"}, "required": ["n1"]}`,
			[]string{`{"n1":7}`, `{"n1":5,"s":"x","n2":100,"m1":-0.5,"z":null}`},
			[]string{`{}`, `{"n1":4}`, `{"n1":10}`, `{"n1":7,"n2":"x"}`, `{"n1":7,"n21":10}`, `{"n1":7,"z":1}`},
		},
		{`{"type": "object", "propertyNames": {"enum": ["red", "green"]}, "additionalProperties": {"type": "integer"}}`, []string{`{}`, `{"green":1,"red":2}`}, []string{`{"blue":1}`, `{"red":"x"}`}},
		{`{"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}, "properties": {"de": {"const": 1}, "x": {}}, "additionalProperties": {"const": 2}}`, []string{`{"de":1,"fr":2}`}, []string{`{"x":1}`, `{"de":2}`, `{"fra":2}`}},
		{`{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, "minProperties": 1, "maxProperties": 2}`, []string{`{"a":1}`, `{"b":1, "c":2}`}, []string{`{}`, `{"a":1,"b":2,"c":3}`}},
		{`{"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 10}, "maxItems": 3}`, []string{`[10]`, `[1,12,3]`}, []string{`[]`, `[1,2]`, `[1,2,3,10]`, `["x",10]`}},
		{`{"contains": {"const": "x"}, "minContains": 2, "maxContains": 2}`, []string{`["x","x"]`, `[1,"x",null,"x"]`}, []string{`["x"]`, `["x","x","x"]`}},
		// Passwords.
		{`{"type": "string", "pattern": "^(?=.*[a-z])(?=.*\\d)(?!.*\")[\\x20-\\x7e]{4,}$", "maxLength": 6}`, []string{`"ab12"`, `"\\a1 x"`}, []string{`"abcd"`, `"1234"`, `"a1\"bc"`, `"ab12345"`, `"a\u0031bc"`}},
		{`{"type": "object", "properties": {"a/b~": {"type": "null"}}, "required": ["a/b~"]}`, []string{`{"a/b~":null}`}, nil},
	} {
		e, err := schema.Compile([]byte(c.schema), schema.Options{})
		if err != nil {
			t.Errorf("%s: %v", c.schema, err)
			continue
		}
		g, err := grammar.New(e, nil)
		if err != nil {
			t.Errorf("%s: %v", c.schema, err)
			continue
		}
		for _, s := range c.yes {
			if !g.Match(s) {
				t.Errorf("%s: %s is refused", c.schema, s)
			}
		}
		for _, s := range c.no {
			if g.Match(s) {
				t.Errorf("%s: %s is accepted", c.schema, s)
			}
		}
	}
}

func TestRefused(t *testing.T) {
	for text, want := range map[string]string{
		`{"properties": {"a/b": {"not": {"format": "date"}}}}`:                 "format at #/properties/a~1b/not: it is not supported within not or if",
		`{"if": {"multipleOf": 2}, "then": {}}`:                                "multipleOf at #/if: it is not supported within not or if",
		`{"not": {"enum": [[1]]}}`:                                             "enum at #/not: an array or an object in it is not supported within not",
		`{"not": {"$ref": "#"}}`:                                               "$ref at #: it refers to itself",
		`{"not": 1}`:                                                           "at #/not: a schema must be an object",
		`{"dependentRequired": {"a": {}}}`:                                     `dependentRequired at #: "a" must have a list of names`,
		`{"dependentSchemas": {"a": []}}`:                                      `dependentSchemas at #: "a" must have a schema`,
		`{"dependentRequired": {"a": [1]}}`:                                    "dependentRequired at #: it must be a list of names",
		`{"unevaluatedProperties": false}`:                                     "unevaluatedProperties at #: it is not supported",
		`{"items": {"multipleOf": 997}}`:                                       "multipleOf at #/items: it is not supported with so many digits",
		`{"multipleOf": 1e-13}`:                                                "multipleOf at #: it is not supported",
		`{"multipleOf": 0}`:                                                    "multipleOf at #: it must be above 0",
		`{"multipleOf": "2"}`:                                                  "multipleOf at #: it must be a number",
		`{"patternProperties": {"(": {}}}`:                                     "patternProperties at #: \"(\": missing closing )",
		`{"patternProperties": 1}`:                                             "patternProperties at #: it must be an object",
		`{"patternProperties": {"a": {}, "b": {}, "c": {}, "d": {}, "e": {}}}`: "patternProperties at #: more than 4 patterns",
		`{"type": "object", "minProperties": 2}`:                               "minProperties at #: it is not supported above the number of properties and one",
		`{"uniqueItems": "true"}`:                                              "uniqueItems at #: it must be true or false",
		`{"uniqueItems": true}`:                                                "uniqueItems at #: it is supported where items have few values",
		`{"uniqueItems": true, "items": {"enum": [1,2,3,4,5,6,7,8,9,10,11,12,13]}}`: "uniqueItems at #: its items have 13 values",
		`{"contains": {}, "minContains": 2000}`:                                     "contains at #: it is not supported beside so large numbers",
		`{"contains": {}, "allOf": [{"contains": {"type": "null"}}]}`:               "contains at #: it is not supported beside another contains",
		`{"type": "str"}`:                   `type at #: it must be array, boolean, integer, null, number, object or string, and is "str"`,
		`{"$ref": "#/$defs/x"}`:             `there is no "#/$defs/x"`,
		`{"$ref": "https://example.com/a"}`: "only references within the schema",
		`{"prefixItems": [{"$id": "http://example.com/a", "$defs": {"b": {}}, "allOf": [{"$ref": "#/$defs/b"}]}], "$defs": {"b": {"type": "null"}}}`: "$ref at #/prefixItems/0/allOf/0: \"#/$defs/b\" is not supported: it is within a schema with an $id",
		`{"$ref": "#/$defs/b", "$defs": {"b": {"$id": "http://example.com/b", "items": {}}}}`:                                                        "$ref at #: \"#/$defs/b\" is not supported: it leads into a schema with an $id",
		`{"$ref": "#"}`: "$ref at #: it refers to itself",
		`{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}`: "refers to itself",
		`{"allOf": [{"$ref": "#"}]}`:                                                                   "refers to itself",
		`{"oneOf": [{"type": "string"}, {"format": "date"}]}`:                                          "that differ; what would distinguish them here: format at #/oneOf/1",
		`{"type": "string", "pattern": "(?<=a)"}`:                                                      "pattern at #: lookbehind",
		`{"type": "string", "pattern": 1}`:                                                             "it must be a string",
		`{"allOf": [{"pattern": "a"}, {"pattern": "((?=a)a)*"}]}`:                                      "pattern at #/allOf/1: lookahead",
		`{"$ref": "#/$defs/a", "type": "string", "minLength": 1, "$defs": {"a": {"pattern": "a\\b"}}}`: "pattern at #/$defs/a: word boundaries",
		`{"type": "array", "items": [{}], "prefixItems": [{}]}`:                                        "it must be one schema beside prefixItems",
		`{"propertyNames": {"pattern": "("}}`:                                                          "pattern at #/propertyNames: missing",
		`{"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {"multipleOf": 2}}}], "discriminator": {"propertyName": "a"}}`: "multipleOf at #/oneOf/1/properties/a: it is not supported within not or if, or in a oneOf whose schemas may both fit",
		`{"oneOf": [{"const": 1e50}, {"enum": [10e49, 2]}]}`: "what would distinguish them here: enum at #/oneOf/1: 10e49 has more than 40 digits",
		`{"minimum": "1"}`:  "minimum at #: it must be a number",
		`{"maxLength": -1}`: "not negative",
		`{"enum": 1}`:       "it must be a list",
		`{"anyOf": []}`:     "and not empty",
		`[]`:                "a schema must be an object",
		`{`:                 "not valid JSON",
		`{} {}`:             "more behind the schema",
		`{"items": {"enum": [1e50, "a"], "minimum": 1}}`:                   "enum at #/items: the keywords beside it: 1e50 has more than 40 digits",
		strings.Repeat(`{"items":`, 200) + `{}` + strings.Repeat(`}`, 200): "nested more than",
	} {
		_, err := schema.Compile([]byte(text), schema.Options{})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want an error with %q", text, err, want)
		}
	}
	// References that double at each level.
	for _, keyword := range []string{"allOf", "anyOf"} {
		var defs []string
		for i := range 60 {
			defs = append(defs, fmt.Sprintf(`"d%d": {%q: [{"$ref": "#/$defs/d%d"}, {"$ref": "#/$defs/d%d"}]}`, i, keyword, i+1, i+1))
		}
		_, err := schema.Compile([]byte(`{"$ref": "#/$defs/d0", "$defs": {`+strings.Join(defs, ",")+`, "d60": {"type": "string"}}}`), schema.Options{})
		if err == nil || !strings.Contains(err.Error(), "too many") && !strings.Contains(err.Error(), "more than") {
			t.Errorf("%s: %v", keyword, err)
		}
	}
}

// TestTooLarge: a grammar with too many states is refused with the nearest place that is too large, or else the largest.
func TestTooLarge(t *testing.T) {
	racedetector.SkipSequential(t)
	for text, want := range map[string]string{
		`{"type": "string", "maxLength": 100000}`:                                                                                                                    "maxLength at #: it needs too many states",
		`{"properties": {"a": {}, "b": {"items": {"anyOf": [{"minLength": 5000}, {}]}}}}`:                                                                            "minLength at #/properties/b/items/anyOf/0: it needs",
		`{"properties": {"a": {"maxLength": 9}, "x": {"pattern": "(a|b)*a(a|b){20}$"}}}`:                                                                             "pattern at #/properties/x: it needs",
		`{"properties": {"a": {"maxLength": 9}, "x": {"pattern": "a", "maxLength": 10000}}}`:                                                                         "pattern beside maxLength at #/properties/x: it needs",
		`{"items": {"pattern": "a.{9}b", "minLength": 20, "maxLength": 400}}`:                                                                                        "pattern beside minLength and maxLength at #/items: it needs",
		`{"items": {"pattern": "a.{7}b", "allOf": [{"pattern": "c.{9}d"}]}}`:                                                                                         "pattern beside another pattern at #/items: it needs",
		`{"type": "string", "maxLength": 9, "allOf": [{"pattern": "a"}, {"pattern": "a"}, {"pattern": "(a|b)*a(a|b){20}$"}, {"pattern": "b"}]}`:                      "pattern beside 2 other patterns and maxLength at #/allOf/0: it needs",
		`{"type": "string", "anyOf": [{"minLength": 2}, {"pattern": "(a|b)*a(a|b){20}$"}]}`:                                                                          "pattern at #/anyOf/1: it needs",
		`{"properties": {"a": {"format": "email", "maxLength": 254}, "b": {"format": "email", "maxLength": 254}, "c": {"maxLength": 800}, "d": {"maxLength": 800}}}`: "",
		`{"items": {"format": "email", "minLength": 99999, "pattern": "@"}}`:                                                                                         "",
		`{"properties": {"a": {"type": "array", "items": {"maxLength": 9}, "maxItems": 5000}}}`:                                                                      "at #/properties/a: it needs",
		`{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"maxLength": 10000}}}`:                                                                         "maxLength at #/$defs/b: it needs",
		`{"properties": {"a": {"maxLength": 900}, "b": {"maxLength": 1000}, "c": {"maxLength": 800}}}`:                                                               "maxLength at #/properties/b, the largest part: it needs",
		`{"items": {"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}, "uniqueItems": true}}`:                                              "uniqueItems at #/items: it needs too many states",
		`{"items": {"pattern": "^(?=.*a.{9}b)(?=.*c.{9}d)", "maxLength": 90}}`:                                                                                       "pattern beside maxLength at #/items: it needs",
		`{"patternProperties": {"a.{14}b": {}}}`:                                                                                                                     "patternProperties at #: \"a.{14}b\": it needs too many states",
		`{"properties": {"a": {"enum": ["a"], "pattern": "(a|b)*a(a|b){20}$"}}}`:                                                                                     "enum at #/properties/a: the keywords beside it need too many states",
	} {
		e, err := schema.Compile([]byte(text), schema.Options{})
		if err == nil {
			_, err = grammar.New(e, nil)
		}
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", text, err)
		case want != "" && (err == nil || !strings.HasPrefix(err.Error(), want)):
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
}

// manyAlternatives is a schema of which comparing the alternatives would take minutes. Most of them do not hold together.
func manyAlternatives() []byte {
	var values, names []string
	for i := range 200 {
		values = append(values, fmt.Sprintf(`{"$ref": "#/$defs/names", "const": %d}`, i))
		names = append(names, fmt.Sprintf(`"%d": {}`, i))
	}
	return []byte(`{"$defs": {"names": {"properties": {` + strings.Join(names, ", ") + `}}, "value": {"anyOf": [` + strings.Join(values, ", ") + `]}},
		"items": {"allOf": [` + strings.Repeat(`{"$ref": "#/$defs/value"}, `, 38) + `{}]}}`)
}

// TestManyAlternatives: what comparing alternatives takes has a limit, which several schemas can share.
func TestManyAlternatives(t *testing.T) {
	o := schema.Options{Work: &schema.Work{}}
	_, err := schema.Compile(manyAlternatives(), o)
	if err == nil || !strings.HasPrefix(err.Error(), "at #/items: its keywords with alternatives") || !strings.Contains(err.Error(), "take too long: give it") {
		t.Errorf("error %v", err)
	}
	const small = `{"anyOf": [{"type": "null"}, {"type": "string"}]}`
	if _, err := schema.Compile([]byte(small), o); err == nil || !strings.Contains(err.Error(), "take too long: give it") {
		t.Errorf("error %v of another schema", err)
	}
	if _, err := schema.Compile([]byte(small), schema.Options{}); err != nil {
		t.Error(err)
	}
}

// TestManyMembers: so has what the members of alternatives take, here 1.4 GB.
func TestManyMembers(t *testing.T) {
	racedetector.SkipSequential(t)
	var names, more []string
	for i := range 1000 {
		names = append(names, fmt.Sprintf(`"%d": {}`, i))
	}
	for i := range 50 {
		more = append(more, fmt.Sprintf(`"%d": {"$ref": "#/$defs/many", "minLength": 1}`, i))
	}
	_, err := schema.Compile([]byte(`{"$defs": {"names": {"properties": {`+strings.Join(names, ", ")+`}}, "many": {"anyOf": [`+strings.Repeat(`{"$ref": "#/$defs/names"}, `, 249)+`{}]}},
		"properties": {`+strings.Join(more, ", ")+`}}`), schema.Options{})
	if err == nil || !strings.Contains(err.Error(), "take too long: give it") {
		t.Errorf("error %v", err)
	}
}

// TestSharedStates: so has what the grammars take that a compilation needs itself.
func TestSharedStates(t *testing.T) {
	for text, want := range map[string]string{
		`{"enum": ["a"], "pattern": "a"}`:  "enum at #: the keywords beside this and other enums need too many states together",
		`{"patternProperties": {"a": {}}}`: `patternProperties at #: "a": it needs too many states`,
	} {
		if _, err := schema.Compile([]byte(text), schema.Options{Work: &schema.Work{}}); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if _, err := schema.Compile([]byte(text), schema.Options{Work: &schema.Work{States: grammar.MaxWork + 1}}); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
}

// TestCancelled: a compilation ends with its context.
func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	cancel(gone)
	o := schema.Options{Context: ctx, Work: &schema.Work{}}
	for _, text := range []string{`true`, `{"items": {}}`, `{"additionalProperties": true, "propertyNames": {"minLength": 1}}`} {
		if _, err := schema.Compile([]byte(text), o); !errors.Is(err, gone) {
			t.Errorf("%s: error %v", text, err)
		}
	}
	if _, err := schema.Compile(manyAlternatives(), o); !errors.Is(err, gone) {
		t.Errorf("error %v", err)
	}
	if _, err := schema.Compile([]byte(`{"enum": ["a"], "pattern": "([ac]|b)*a[abc]{15}"}`), o); !errors.Is(err, gone) {
		t.Errorf("error %v", err)
	}
	if _, err := schema.Compile([]byte(`{"patternProperties": {"([ac]|b)*a[abc]{15}": {}}}`), o); err == nil || !strings.HasSuffix(err.Error(), "gone") {
		t.Errorf("error %v", err)
	}
}

// TestManyEnums: enums beside keywords that need many states, each of which would take half a second, have one limit
// together, also where nothing fits them.
func TestManyEnums(t *testing.T) {
	racedetector.SkipSequential(t)
	for _, beside := range []string{`"pattern": "^.{700}%d"`, `"pattern": "^.{700}%[1]dx", "allOf": [{"pattern": "^.{700}%[1]dy"}]`} {
		var parts []string
		for i := range 200 {
			parts = append(parts, fmt.Sprintf(`"a%d": {"enum": ["x"], `+beside+`}`, i, 1000+i))
		}
		_, err := schema.Compile([]byte(`{"properties": {`+strings.Join(parts, ", ")+`}}`), schema.Options{})
		if err == nil || !strings.HasPrefix(err.Error(), "enum at #/properties/a") || !strings.Contains(err.Error(), "other enums need too many states together") {
			t.Errorf("%s: error %v", beside, err)
		}
	}
}

// TestStrings: of random texts exactly those are written that package regexp and the number of characters allow, in the
// spelling that patterns give to characters; in another spelling, no others.
func TestStrings(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	patterns := []string{`^[a-c"]+$`, `é.b`, `^(a|\\|\n)*$`, `[^a]{3}$`, `^\S{2}`, `a+`, `^.{2,4}$`, `^a|é$|b"`, `[\x00-\x1f"]`, `😀`, `^([^"]|"a)*$`}
	chars := [][2]string{{"a", `\u0061`}, {"b", `\u0062`}, {`"`, `\u0022`}, {`\`, `\u005C`}, {"\n", `\u000a`}, {"é", `\u00E9`}, {"😀", "😀"}, {"\x01", `\u0001`}, {" ", `\u0020`}}
	fitting := 0
	for range 400 {
		p, q := patterns[r.IntN(len(patterns))], patterns[r.IntN(len(patterns))]
		least := r.IntN(5)
		most := least + r.IntN(4)
		text, err := json.Marshal(map[string]any{"pattern": p, "minLength": least, "maxLength": most, "allOf": []any{map[string]any{"pattern": q}}})
		if err != nil {
			t.Fatal(err)
		}
		e, err := schema.Compile(text, schema.Options{})
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		g, err := grammar.New(grammar.Any(e, grammar.Literal("null")), nil)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		first, second := regexp.MustCompile(p), regexp.MustCompile(q)
		for range 200 {
			value, usual, other := "", "", ""
			n := r.IntN(8)
			for range n {
				c := chars[min(r.IntN(len(chars)), r.IntN(len(chars)))]
				own, err := json.Marshal(c[0])
				if err != nil {
					t.Fatal(err)
				}
				value += c[0]
				usual += string(own[1 : len(own)-1])
				other += c[1]
			}
			fits := n >= least && n <= most && first.MatchString(value) && second.MatchString(value)
			if fits {
				fitting++
			}
			if got := g.Match(`"` + usual + `"`); got != fits {
				t.Fatalf("%s: %s is accepted: %v, want %v", text, usual, got, fits)
			}
			if g.Match(`"`+other+`"`) && !fits {
				t.Fatalf("%s: %s is accepted", text, other)
			}
		}
	}
	if fitting < 1000 {
		t.Errorf("only %d texts fit", fitting)
	}
}

// TestLargeUnion: a oneOf of as many alternatives as there may be is told apart by their tag.
func TestLargeUnion(t *testing.T) {
	var kinds []string
	for i := range 250 {
		kinds = append(kinds, fmt.Sprintf(`{"type": "object", "properties": {"kind": {"const": "k%d"}, "a": {"type": "string"}}, "required": ["kind"]}`, i))
	}
	if _, err := schema.Compile([]byte(`{"oneOf": [`+strings.Join(kinds, ", ")+`]}`), schema.Options{}); err != nil {
		t.Error(err)
	}
}

// TestMembers: properties are listed where nothing else restricts which of them there are.
func TestMembers(t *testing.T) {
	for text, ok := range map[string]bool{
		`{"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 1, "maxProperties": 2}`: true,
		`{"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}`:                                        false,
		`{"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}`:                                        false,
		`{"type": "object", "properties": {"a": {}}, "additionalProperties": true}`:                                       false,
		`{"type": "object"}`: false,
	} {
		if _, got := schema.Members([]byte(text), schema.Options{}); got != ok {
			t.Errorf("%s: %v, want %v", text, got, ok)
		}
	}
}

// TestMemberValues: the values of a member are those that the keywords beside its enum allow.
func TestMemberValues(t *testing.T) {
	members, _ := schema.Members([]byte(`{"type": "object", "properties": {"a": {"type": "string", "enum": ["x", "yy", "y"], "maxLength": 1}}}`), schema.Options{})
	if len(members) != 1 || !members[0].Text || !slices.Equal(members[0].Values, []string{"x", "y"}) {
		t.Errorf("members %+v", members)
	}
}

// TestSupported: what is left of a schema without the keywords that are not supported is.
func TestSupported(t *testing.T) {
	for text, want := range map[string]string{
		`{"type": "array", "items": {"type": "string"}, "uniqueItems": true}`:                                                  `{"type":"array","items":{"type":"string"}}`,
		`{"properties": {"a/b": {"type": "string", "pattern": "a\\b"}, "c": {"multipleOf": 997}}, "unevaluatedProperties": 1}`: `{"properties":{"a/b":{"type":"string"},"c":{}}}`,
		`{"anyOf": [{"$ref": "http://x/y"}, {"type": "null"}]}`:                                                                `{"anyOf":[{},{"type":"null"}]}`,
		`{"type": "string", "not": {"minLength": 3, "format": "date"}}`:                                                        `{"type":"string"}`,
		`{"properties": {"not": {"pattern": "("}}}`:                                                                            `{"properties":{"not":{}}}`,
		`{"maxLength": 3}`: `{"maxLength":3}`,
	} {
		got, err := schema.Supported([]byte(text), schema.Options{})
		if err != nil || string(got) != want {
			t.Errorf("%s: %s, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{`{`, `[]`, `{"properties": {` + strings.Repeat(`"a": {"multipleOf": 997}, `, 3) + `"b": []}}`} {
		if got, err := schema.Supported([]byte(text), schema.Options{}); err == nil {
			t.Errorf("%s: %s", text, got)
		}
	}
}

func TestSpace(t *testing.T) {
	for pattern, ok := range map[string]bool{`[ \n]?`: true, ``: true, `\t{0,3}`: true, `x?`: false, `.*`: false, `\s*`: false, `[ \n\t\r]*`: true, `(`: false} {
		if _, err := schema.Space(pattern); (err == nil) != ok {
			t.Errorf("%s: %v", pattern, err)
		}
	}
	space, _ := schema.Space(` {2}`)
	for _, c := range []struct {
		o    schema.Options
		text string
		want bool
	}{
		{schema.Options{Compact: true}, `{"a":[1,2]}`, true},
		{schema.Options{Compact: true}, `{"a": [1,2]}`, false},
		{schema.Options{Space: space}, `{  "a"  :  [  1  ,  2  ]  }`, true},
		{schema.Options{Space: space}, `{"a":[1,2]}`, false},
		{schema.Options{}, strings.Repeat(" ", 2) + `{}`, false},
	} {
		g, err := grammar.New(schema.AnyObject(c.o), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := g.Match(c.text); got != c.want {
			t.Errorf("%+v: %s: %v", c.o, c.text, got)
		}
	}
}

// random schemas of all constructs.
func random(r *rand.Rand, depth int) map[string]any {
	s := map[string]any{}
	pick := func(values ...any) any { return values[r.IntN(len(values))] }
	maybe := func(f func()) {
		if r.IntN(2) == 0 {
			f()
		}
	}
	n := 20
	if depth == 0 {
		n = 8
	}
	switch r.IntN(n) {
	case 0:
		s["type"] = "integer"
		maybe(func() { s["minimum"] = r.IntN(2000) - 1000 })
		maybe(func() { s["maximum"] = 1000 + r.IntN(100000) })
		maybe(func() { s["multipleOf"] = pick(1, 2, 7, 12, 25, 1000, 2.5) })
	case 1:
		s["type"] = "number"
		maybe(func() { s[pick("minimum", "exclusiveMinimum").(string)] = float64(r.IntN(20000)-10000) / 64 })
		maybe(func() { s[pick("maximum", "exclusiveMaximum").(string)] = 157 + float64(r.IntN(10000))/64 })
		maybe(func() { s["multipleOf"] = pick(0.01, 0.05, 1.5, 3, json.Number("1e-8"), 0.125) })
	case 2:
		s["type"] = "string"
		maybe(func() { s["minLength"] = r.IntN(5) })
		maybe(func() { s["maxLength"] = 5 + r.IntN(10) })
	case 3:
		pattern := func() any {
			return pick("^[a-z]+$", "x.y", "^(a|b\"|\\\\)*$", "[0-9]{3}$", "^\\S{2}", "é+", "[^a-z]\n?", "^.{2,9}$|é$")
		}
		s["type"], s["pattern"] = "string", pattern()
		maybe(func() { s["minLength"] = r.IntN(6) })
		maybe(func() { s["maxLength"] = 5 + r.IntN(10) })
		maybe(func() { s["allOf"] = []any{map[string]any{"pattern": pattern()}} })
	case 4:
		s["type"], s["format"] = "string", pick("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
		maybe(func() { s["maxLength"] = 5 + r.IntN(40) })
		maybe(func() { s["pattern"] = pick("1", "^[^9]*$", "[a-z0-9]$", ".{6}") })
	case 5:
		s["enum"] = []any{pick("a", "é\"", 1), 2, nil, true, pick([]any{1, "x"}, map[string]any{"k": 1.5})}
	case 6:
		s["type"] = pick("boolean", "null", []any{"string", "null"}, []any{"integer", "boolean"})
	case 7:
		s["const"] = pick("c", 3, false)
	case 8, 9:
		s["type"] = "object"
		properties, required := map[string]any{}, []any{}
		for i := range r.IntN(5) {
			name := fmt.Sprintf("%c%d", 'a'+r.IntN(3), i)
			properties[name] = random(r, depth-1)
			maybe(func() { required = append(required, name) })
		}
		s["properties"], s["required"] = properties, required
		maybe(func() { s["additionalProperties"] = pick(false, true, random(r, depth-1)) })
		maybe(func() { s[pick("minProperties", "maxProperties").(string)] = r.IntN(5) })
	case 10:
		s["type"], s["items"] = "array", random(r, depth-1)
		maybe(func() { s["minItems"] = r.IntN(3) })
		maybe(func() { s["maxItems"] = 3 + r.IntN(3) })
		maybe(func() { s["prefixItems"] = []any{random(r, depth-1), random(r, depth-1)} })
	case 11:
		s["anyOf"] = []any{random(r, depth-1), random(r, depth-1)}
	case 12:
		s["allOf"] = []any{random(r, depth-1), map[string]any{"type": []any{"object", "array", "string", "integer"}}}
	case 13:
		s["oneOf"] = []any{random(r, depth-1), random(r, depth-1)}
	case 14:
		s = random(r, depth-1)
		s["not"] = random(r, depth-1)
	case 15:
		s = random(r, depth-1)
		s["if"], s["then"] = random(r, depth-1), random(r, depth-1)
		maybe(func() { s["else"] = random(r, depth-1) })
	case 16:
		s["type"], s["patternProperties"] = "object", map[string]any{pick("^a", "0$", "[b\"]").(string): random(r, depth-1), pick("é", "1", "^.?$").(string): random(r, depth-1)}
		maybe(func() {
			s["properties"], s["required"] = map[string]any{"a1": random(r, depth-1)}, []any{pick("a1", "b0")}
		})
		maybe(func() { s["additionalProperties"] = pick(false, true, random(r, depth-1)) })
	case 17:
		s["type"], s["propertyNames"] = "object", pick(map[string]any{"maxLength": 3}, map[string]any{"enum": []any{"a0", "b"}}, map[string]any{"pattern": "^[a-d\"]+$"}, map[string]any{"not": map[string]any{"pattern": "a"}})
		maybe(func() { s["properties"] = map[string]any{"a0": random(r, depth-1), "dé": true} })
		maybe(func() { s["additionalProperties"] = random(r, depth-1) })
	case 18:
		s["type"] = "array"
		if s["items"] = random(r, depth-1); r.IntN(3) == 0 {
			s["items"], s["uniqueItems"] = pick(map[string]any{"enum": []any{"a", "b", 1, 1.5}}, map[string]any{"type": []any{"boolean", "null"}}), true
		} else {
			s["contains"] = random(r, depth-1)
			maybe(func() { s["minContains"] = r.IntN(3) })
			maybe(func() { s["maxContains"] = r.IntN(4) })
		}
		maybe(func() { s["minItems"] = r.IntN(3) })
		maybe(func() { s["maxItems"] = 2 + r.IntN(3) })
	case 19:
		s["type"], s["properties"] = "object", map[string]any{"a0": random(r, depth-1), "a1": true}
		s[pick("dependentRequired", "dependencies").(string)] = map[string]any{"a0": []any{"a1"}}
		maybe(func() { s["dependentSchemas"] = map[string]any{"a1": random(r, depth-1)} })
	}
	return s
}

// exact are schemas of which every value is written.
func exact(r *rand.Rand, depth int) any {
	sub := func() any { return exact(r, depth-1) }
	pick := func(values ...any) any { return values[r.IntN(len(values))] }
	n := 20
	if depth == 0 {
		n = 8
	}
	switch r.IntN(n) {
	case 0:
		return map[string]any{"type": pick("integer", "string", "null", "boolean", "object", "array", []any{"number", "string"}, []any{"null", "array"})}
	case 1:
		return map[string]any{pick("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum").(string): pick(0, 1, 1.5)}
	case 2:
		return map[string]any{pick("minLength", "maxLength", "minItems", "maxItems", "maxProperties").(string): r.IntN(3)}
	case 3:
		return map[string]any{"pattern": pick("^a", "b$", "a.b", "^$", "[^a]")}
	case 4:
		return map[string]any{"enum": []any{pick("a", "ab", ""), pick(0, 1, 1.5), pick(nil, true)}}
	case 5:
		return map[string]any{"required": pick([]any{"a"}, []any{"b", "a"})}
	case 6:
		return pick(true, false)
	case 7:
		return map[string]any{"const": pick("b", 2, nil, false)}
	case 8:
		return map[string]any{"properties": map[string]any{"a": sub(), "ab": sub()}}
	case 9:
		return map[string]any{"properties": map[string]any{"b": sub()}, "additionalProperties": sub()}
	case 10:
		return map[string]any{"patternProperties": map[string]any{"a": sub(), pick("^b", "b$").(string): sub()}, "additionalProperties": sub()}
	case 11:
		return map[string]any{"propertyNames": sub()}
	case 12:
		return map[string]any{"items": sub()}
	case 13:
		return map[string]any{"prefixItems": []any{sub(), sub()}, "items": sub()}
	case 14:
		return map[string]any{"contains": sub(), "minContains": r.IntN(3), "maxContains": 1 + r.IntN(2)}
	case 15:
		return map[string]any{"not": sub()}
	case 16:
		return map[string]any{"if": sub(), "then": sub(), "else": sub()}
	case 17:
		return map[string]any{pick("anyOf", "oneOf", "allOf").(string): []any{sub(), sub(), sub()}}
	case 18:
		return map[string]any{pick("dependentRequired", "dependencies").(string): map[string]any{"a": []any{"b"}}, "dependentSchemas": map[string]any{"b": sub()}}
	}
	joined := map[string]any{}
	for range 3 {
		if m, ok := sub().(map[string]any); ok {
			maps.Copy(joined, m)
		}
	}
	return joined
}

// TestExact: of all values of a small world exactly those are written that a validator of others takes.
func TestExact(t *testing.T) {
	world := []any{nil, true, false, 0, 1, 1.5, 2, "", "a", "b", "ab", "aab", "c"}
	for _, x := range world[1:] {
		world = append(world, []any{x}, []any{x, "a"}, map[string]any{"a": x}, map[string]any{"b": x, "ab": 1}, map[string]any{"a": "b", "b": x, "c": 1}, []any{x, 1, x})
	}
	world = append(world, []any{}, map[string]any{}, map[string]any{"": 1}, []any{[]any{"a"}, map[string]any{"a": nil}})
	texts := make([][]string, len(world))
	for i, v := range world {
		texts[i] = orders(v)
	}
	r := rand.New(rand.NewPCG(11, 12))
	tried, valid := 0, 0
	for range 700 {
		data, err := json.Marshal(exact(r, 3))
		if err != nil {
			t.Fatal(err)
		}
		e, err := schema.Compile(data, schema.Options{Open: true, Compact: true})
		if err != nil {
			continue
		}
		match := func(string) bool { return false }
		if g, err := grammar.New(e, nil); err == nil {
			match = g.Match
		} else if !errors.Is(err, grammar.ErrNoText) {
			t.Fatalf("%s: %v", data, err)
		}
		validator, err := validatorOf(data)
		if err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		tried++
		for i, v := range world {
			want := validator.Validate(v) == nil
			if want {
				valid++
			}
			if got := slices.ContainsFunc(texts[i], match); got != want {
				t.Fatalf("%s: %v is written: %v, want %v", data, texts[i][0], got, want)
			}
		}
	}
	if tried < 500 || valid < 9000 {
		t.Errorf("%d schemas, %d valid values", tried, valid)
	}
}

// validatorOf is that of others.
func validatorOf(data []byte) (*jsonschema.Schema, error) {
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(string(data)))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	c.DefaultDraft(jsonschema.Draft2020)
	if err := c.AddResource("schema.json", document); err != nil {
		return nil, err
	}
	return c.Compile("schema.json")
}

// alphabet is a vocabulary of bytes, and of tokens like those of real ones.
var alphabet, alphabetText = func() (*grammar.Vocabulary, []string) {
	var tokens []grammar.Token
	var texts []string
	add := func(text string) {
		texts = append(texts, text)
		tokens = append(tokens, grammar.Token{ID: int32(len(tokens)), Text: text, First: text})
	}
	for b := range 256 {
		add(string([]byte{byte(b)}))
	}
	for _, t := range strings.Split(`{"|":|": |", "|","|"}|}}|]}|[{|[[|],|},|{}|[]|null|true|false|"a|a0|b1|": "|\"|\\|\u00|00|12|.5|-1|-0|e+|é|日本|  |, |: |"}]|"],|-02|T0|:0|Z"|@a|::`, "|") {
		add(t)
	}
	return grammar.NewVocabulary(len(tokens), tokens), texts
}()

// write lets a source of random numbers write a text of a grammar. Late it prefers what ends the text.
func write(r *rand.Rand, g *grammar.Grammar) (text string, ok bool) {
	m := g.Matcher()
	var b strings.Builder
	for n := range 4000 {
		if m.Ended() || m.MayEnd() && r.IntN(4) == 0 {
			return b.String(), true
		}
		bits := m.Mask()
		var ids []int32
		for id := range int32(len(alphabetText)) {
			if bits[id/32]>>(id%32)&1 != 0 {
				ids = append(ids, id)
			}
		}
		id := ids[r.IntN(len(ids))]
		if n > 200 {
			for _, closing := range `"}],:0` {
				if bits[closing/32]>>(closing%32)&1 != 0 {
					id = closing
					break
				}
			}
		}
		m.Accept(id)
		b.WriteString(alphabetText[id])
	}
	return b.String(), false
}

// TestRandom has random schemas write random texts, which a validator of others judges.
func TestRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	schemas, texts := 0, 0
	for range 400 {
		data, err := json.Marshal(random(r, 3))
		if err != nil {
			t.Fatal(err)
		}
		n, err := check(r, data, schema.Options{}, 12)
		if err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		if n > 0 {
			schemas++
			texts += n
		}
	}
	if schemas < 250 {
		t.Errorf("only %d schemas of 400 were tried", schemas)
	}
	t.Logf("%d texts of %d schemas", texts, schemas)
}

// TestSchemasOfClients: those that pydantic, zod and the openai packages write of all their kinds of fields are supported,
// and have texts that are valid.
func TestSchemasOfClients(t *testing.T) {
	f, err := os.Open("testdata/clients.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := rand.New(rand.NewPCG(13, 14))
	schemas, texts := 0, 0
	for scan := bufio.NewScanner(f); scan.Scan(); {
		var line struct {
			Client, Kind string
			Schema       json.RawMessage
		}
		if err := json.Unmarshal(scan.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		e, err := schema.Compile(line.Schema, schema.Options{})
		if err == nil {
			_, err = grammar.New(e, nil)
		}
		if line.Kind == "hostname" && strings.Contains(string(line.Schema), "pattern") { // its pattern and its format count beside each other
			if !errors.Is(err, grammar.ErrTooLarge) {
				t.Errorf("%s, %s: error %v", line.Client, line.Kind, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s, %s: %v: %s", line.Client, line.Kind, err, line.Schema)
			continue
		}
		schemas++
		if regexp.MustCompile(`"nullable":true|"format":"regex"`).Match(line.Schema) {
			continue // the validator does not know OpenAPI's, and takes only Go's regular expressions
		}
		n, err := check(r, line.Schema, schema.Options{}, 3)
		if err != nil {
			t.Errorf("%s, %s: %v: %s", line.Client, line.Kind, err, line.Schema)
		}
		texts += n
	}
	if schemas < 300 || texts < 2*schemas {
		t.Errorf("%d texts of %d schemas", texts, schemas)
	}
}

// check has a schema write texts, and validates them; 0: the schema is refused, or nothing fits it.
func check(r *rand.Rand, data []byte, o schema.Options, texts int) (int, error) {
	e, err := schema.Compile(data, o)
	if err != nil {
		return 0, nil //nolint:nilerr // refused
	}
	g, err := grammar.New(e, alphabet)
	if err != nil {
		return 0, nil //nolint:nilerr // refused
	}
	validator, err := validatorOf(data)
	if err != nil {
		return 0, nil //nolint:nilerr // what the validator refuses cannot be judged
	}
	done := 0
	for range texts {
		text, ok := write(r, g)
		if !ok {
			continue
		}
		done++
		v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
		if err != nil {
			return done, fmt.Errorf("%q is not JSON: %w", text, err)
		}
		if err := json.Unmarshal([]byte(text), new(any)); err != nil {
			return done, fmt.Errorf("%q is not JSON for encoding/json: %w", text, err)
		}
		if err := validator.Validate(v); err != nil {
			return done, fmt.Errorf("%q is not valid: %w", text, err)
		}
	}
	return done, nil
}

func FuzzCompile(f *testing.F) {
	f.Add([]byte(`{"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": {"type": "number", "minimum": 1.5}}`), uint64(1))
	f.Add([]byte(`{"anyOf": [{"type": "string", "pattern": "a+"}, {"type": "array", "prefixItems": [{}], "items": {"const": 1}}]}`), uint64(2))
	f.Add([]byte(`{"type": "string", "pattern": "^[^a]|é.?$", "minLength": 2, "maxLength": 9, "allOf": [{"pattern": "[a-z\"\\n]{2}"}]}`), uint64(5))
	f.Add([]byte(`{"items": {"type": "string", "format": "email", "pattern": "^[a-m.]+@", "maxLength": 20}, "minItems": 1}`), uint64(6))
	f.Add([]byte(`{"type": "number", "multipleOf": 0.15, "minimum": -2.2, "exclusiveMaximum": 1e3}`), uint64(4))
	f.Add([]byte(`{"patternProperties": {"^a": {"not": {"minimum": 2}}}, "propertyNames": {"maxLength": 3}, "dependentRequired": {"a": ["b"]}}`), uint64(7))
	f.Add([]byte(`{"oneOf": [{"contains": {"enum": ["a", 1]}, "maxContains": 2}, {"if": {"minItems": 2}, "then": {"items": {"type": ["null", "integer"]}}}]}`), uint64(8))
	f.Add([]byte(`{"type": "array", "items": {"enum": [true, "a"]}, "uniqueItems": true, "minProperties": 1}`), uint64(9))
	f.Add([]byte(`{"allOf": [{"enum": [1, 2.0]}, {"type": "integer"}], "oneOf": [{"maximum": 1}, {"minimum": 2}]}`), uint64(3))
	f.Fuzz(func(t *testing.T, data []byte, seed uint64) {
		if _, err := check(rand.New(rand.NewPCG(seed, 1)), data, schema.Options{Open: seed%2 == 0}, 3); err != nil {
			t.Fatalf("%s: %v", data, err)
		}
	})
}
