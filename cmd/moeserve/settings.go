package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"go.yaml.in/yaml/v3"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/node/checkpoint"
	"github.com/moeserve/moeserve/untrusted"
)

const (
	configFlag     = "config"
	configVariable = "MOESERVE_CONFIG"
	// variablePrefix is what all variables begin with.
	variablePrefix = "MOESERVE_"
	// defaultFile is read where no other is named and it is there.
	defaultFile = "moeserve.yaml"
	// maxFileBytes bounds a configuration file.
	maxFileBytes = 1 << 20
)

// otherVariables begin like settings and are read elsewhere: by device/cuda, which
// looks for libraries in the folders that the first names, by the scripts that build
// with CUDA, and by moeserve's own tests.
var otherVariables = []string{
	"MOESERVE_CUDA_LIBRARIES", "MOESERVE_CUDA_INCLUDE",
	"MOESERVE_TESTDATA", "MOESERVE_SCORE", "MOESERVE_HAMMER", "MOESERVE_SOAK_FOR", "MOESERVE_SOAK_DEVICE", "MOESERVE_LOAD", "MOESERVE_PYTHON", "MOESERVE_CUDA_TEST", "MOESERVE_PICKER",
	"MOESERVE_TIER_CASES", "MOESERVE_TEMPLATES", "MOESERVE_TEMPLATE_FUZZ",
}

// addSettings gives a command a flag for each setting, and --config.
func addSettings(flags *pflag.FlagSet, keys []configs.Key) {
	flags.SortFlags = false
	for _, k := range keys {
		v := &flagValue{key: k, text: fmt.Sprint(k.Default)}
		f := flags.VarPF(v, k.Name, k.Short, k.Help)
		if k.Kind == configs.Bool {
			f.NoOptDefVal = "true"
		}
		if k.Default == true {
			no := flags.VarPF(negation{flags, k.Name}, "no-"+k.Name, "", "")
			no.NoOptDefVal, no.Hidden = "true", true
		}
	}
	flags.Var(new(pathValue), configFlag, "YAML file of settings; default: "+defaultFile+", if there is one")
}

// flagValue is a flag's text, checked to be of its setting's kind.
type flagValue struct {
	key  configs.Key
	text string
	// several: each time that the flag is given its value is added, behind a comma, to those before.
	several, given bool
}

func (v *flagValue) String() string { return v.text }

func (v *flagValue) Set(text string) error {
	if _, err := parse(v.key, text); err != nil {
		return err
	}
	if v.several && v.given {
		text = v.text + "," + text
	}
	v.text, v.given = text, true
	return nil
}

// negation is the value of --no-NAME, as vLLM has it: it sets the flag to the opposite.
type negation struct {
	flags *pflag.FlagSet
	name  string
}

func (negation) String() string { return "" }
func (negation) Type() string   { return "bool" }
func (n negation) Set(text string) error {
	v, err := strconv.ParseBool(text)
	if err != nil {
		return errors.New("must be true or false")
	}
	return n.flags.Set(n.name, strconv.FormatBool(!v))
}

// Type is one that viper does not know: it reads such flags as text.
func (v *flagValue) Type() string {
	if v.key.Kind == configs.Bool {
		return "bool"
	}
	return v.placeholder()
}

// placeholder is what help shows for the value.
func (v *flagValue) placeholder() string {
	switch {
	case v.key.Placeholder != "":
		return v.key.Placeholder
	case v.key.Values() != nil:
		return strings.Join(v.key.Values(), "|")
	case v.key.Unit != "":
		return strings.ToUpper(v.key.Unit)
	}
	return "N"
}

// pathValue is the value of a flag that names a file and is no setting.
type pathValue string

func (v *pathValue) String() string { return string(*v) }
func (v *pathValue) Type() string   { return "FILE" }
func (v *pathValue) Set(path string) error {
	*v = pathValue(expandHome(path))
	return nil
}

// pathList is the value of a flag that names a file each time that it is given.
type pathList []string

func (v *pathList) String() string { return strings.Join(*v, ",") }
func (v *pathList) Type() string   { return "FILE" }
func (v *pathList) Set(path string) error {
	*v = append(*v, expandHome(path))
	return nil
}

// expandHome puts the home directory in the place of a "~" that begins a path. "@" in
// front of a path stays.
func expandHome(path string) string {
	rest, at := strings.CutPrefix(path, "@")
	if rest != "~" && !strings.HasPrefix(rest, "~/") {
		return path
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return path
	}
	if rest = filepath.Join(home, rest[1:]); at {
		rest = "@" + rest
	}
	return rest
}

// parse reads a value as flags, variables and files write it.
func parse(k configs.Key, text string) (any, error) {
	var v any
	var err error
	want := ""
	switch k.Kind {
	case configs.String:
		v = text
	case configs.Bool:
		v, err = strconv.ParseBool(text)
		want = "true or false"
	case configs.Int:
		var n int64
		n, err = strconv.ParseInt(text, 0, strconv.IntSize)
		v, want = int(n), "a whole number"
	case configs.Uint:
		v, err = strconv.ParseUint(text, 0, 64)
		want = "a whole number from 0"
	case configs.Float:
		want = "a number"
		if number, percent := strings.CutSuffix(text, "%"); percent && k.Max == 1 {
			var n float64
			n, err = strconv.ParseFloat(number, 64)
			v = n / 100
			break
		}
		v, err = strconv.ParseFloat(text, 64)
	}
	if errors.Is(err, strconv.ErrRange) {
		return nil, errors.New("out of range")
	}
	if err != nil {
		return nil, errors.New("must be " + want)
	}
	return v, nil
}

// source is where a setting's value comes from.
type source struct {
	// Kind is flag, variable, file, policy or default; Name the flag, variable, file or
	// policy.
	Kind, Name string
}

func (s source) String() string {
	if s.Name == "" {
		return s.Kind
	}
	return s.Name
}

// settings are what a command runs with.
type settings struct {
	configs.Settings
	// file is the configuration file that was read; empty for none.
	file string
	// sources by key.
	sources map[string]source
}

// readSettings puts together what flags, variables and file say, and checks it.
// environ is the process's environment, which viper reads by itself.
func readSettings(flags *pflag.FlagSet, environ []string) (*settings, error) {
	variables, err := readVariables(environ)
	if err != nil {
		return nil, err
	}
	s := &settings{sources: map[string]source{}}
	var values map[string]any
	if s.file, values, err = readFile(flags.Lookup(configFlag), variables[configVariable]); err != nil {
		return nil, err
	}
	v := viper.New()
	for _, k := range configs.Schema {
		from := source{Kind: "default"}
		v.SetDefault(k.Name, k.Default)
		if _, ok := values[k.Name]; ok {
			from = source{Kind: "file", Name: s.file}
		}
		if err := v.BindEnv(k.Name, k.Variable()); err != nil {
			return nil, fmt.Errorf("bind %s: %w", k.Variable(), err)
		}
		if variables[k.Variable()] != "" {
			from = source{Kind: "variable", Name: k.Variable()}
		}
		if f := flags.Lookup(k.Name); f != nil && isSetting(f) {
			if err := v.BindPFlag(k.Name, f); err != nil {
				return nil, fmt.Errorf("bind --%s: %w", k.Name, err)
			}
			if f.Changed {
				from = source{Kind: "flag", Name: "--" + k.Name}
			}
		}
		s.sources[k.Name] = from
	}
	if err := v.MergeConfigMap(values); err != nil {
		return nil, usagef("%s: %w", s.file, err)
	}
	if err := s.decode(v); err != nil {
		var bad *configs.SettingError
		if errors.As(err, &bad) {
			if from := s.sources[bad.Key]; from.Kind != "flag" {
				return nil, usagef("%w (from %s)", err, from)
			}
		}
		return nil, &usageError{err}
	}
	return s, nil
}

// decode reads what viper has into the settings, and checks it.
func (s *settings) decode(v *viper.Viper) error {
	for _, k := range configs.Schema {
		if k.Allowed == nil {
			continue
		}
		if err := k.CheckText(v.GetString(k.Name)); err != nil {
			return err
		}
	}
	hooks := mapstructure.ComposeDecodeHookFunc(decodePercent, mapstructure.TextUnmarshallerHookFunc())
	if err := v.UnmarshalExact(&s.Settings, viper.DecodeHook(hooks)); err != nil {
		return err
	}
	expanded, values := map[string]any{}, s.Values()
	for _, k := range configs.Schema {
		if k.Path {
			expanded[k.Name] = expandHome(values[k.Name].(string))
		}
	}
	if s.Model.Name == checkpoint.BuiltIn {
		expanded["model"] = ""
	}
	return s.Put(expanded)
}

// decodePercent reads text like "50%" where a number is expected: parse has let it pass.
func decodePercent(from, to reflect.Type, data any) (any, error) {
	if text, ok := data.(string); ok && from.Kind() == reflect.String && to.Kind() == reflect.Float64 && strings.HasSuffix(text, "%") {
		return parse(configs.Key{Kind: configs.Float, Max: 1}, text)
	}
	return data, nil
}

// readVariables returns the variables of moeserve's that are set and not empty. One
// that is unknown or holds a value of the wrong kind is an error.
func readVariables(environ []string) (map[string]string, error) {
	names := []string{configVariable}
	for _, k := range configs.Schema {
		names = append(names, k.Variable())
	}
	variables := map[string]string{}
	// Sorted, so that of several mistakes always the same is reported.
	for _, e := range slices.Sorted(slices.Values(environ)) {
		name, value, _ := strings.Cut(e, "=")
		if !strings.HasPrefix(name, variablePrefix) || slices.Contains(otherVariables, name) {
			continue
		}
		if !slices.Contains(names, name) {
			return nil, usagef("there is no variable %s%s", name, suggestion(name, names, "moeserve config lists the settings"))
		}
		if value != "" {
			variables[name] = value
		}
	}
	for _, k := range configs.Schema {
		value, ok := variables[k.Variable()]
		if !ok {
			continue
		}
		if _, err := parse(k, value); err != nil {
			return nil, usagef("%s is %q: %w", k.Variable(), value, err)
		}
	}
	return variables, nil
}

// readFile finds the configuration file and reads its values; no path where there
// is none.
func readFile(flag *pflag.Flag, variable string) (path string, values map[string]any, err error) {
	switch {
	case flag != nil && flag.Changed:
		path = flag.Value.String()
	case variable != "":
		path = expandHome(variable)
	default:
		path = defaultFile
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return "", nil, nil
		}
	}
	data, err := untrusted.ReadFile(path, maxFileBytes)
	var size *untrusted.SizeError
	if errors.As(err, &size) {
		return path, nil, usagef("%s is larger than %d KiB: it cannot be a configuration", path, size.Limit>>10)
	}
	if err != nil {
		return path, nil, usagef("read the configuration: %w", err)
	}
	values, err = parseFile(data)
	if err != nil {
		return path, nil, usagef("%s: %w", path, err)
	}
	return path, values, nil
}

// parseFile reads a YAML mapping of settings.
func parseFile(data []byte) (map[string]any, error) {
	var doc yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(data))
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return map[string]any{}, nil
	}
	if err != nil {
		return nil, err
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("must be a single YAML document")
	}
	top := doc.Content[0]
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" {
		return map[string]any{}, nil
	}
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("line %d: must be lines of the form key: value", top.Line)
	}
	values := map[string]any{}
	for i := 0; i < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		k, ok := configs.Find(key.Value)
		if !ok || key.Kind != yaml.ScalarNode {
			var names []string
			for _, k := range configs.Schema {
				names = append(names, k.Name)
			}
			return nil, fmt.Errorf("line %d: there is no key %q%s", key.Line, key.Value, suggestion(key.Value, names, "moeserve config lists the keys"))
		}
		if _, ok := values[k.Name]; ok {
			return nil, fmt.Errorf("line %d: %s is set twice", key.Line, k.Name)
		}
		if value.Kind != yaml.ScalarNode || value.Tag == "!!null" {
			return nil, fmt.Errorf("line %d: %s must be one value", value.Line, k.Name)
		}
		v, err := parse(k, value.Value)
		if err != nil {
			return nil, fmt.Errorf("line %d: %s is %q: %w", value.Line, k.Name, value.Value, err)
		}
		values[k.Name] = v
	}
	return values, nil
}

// logger logs what the settings ask for.
func (s *settings) logger(out io.Writer) *slog.Logger {
	return newLogger(out, &s.Output, s.Output.LogLevel.Level())
}

func newLogger(out io.Writer, settings *configs.Output, level slog.Leveler) *slog.Logger {
	o := &slog.HandlerOptions{Level: level, ReplaceAttr: bounded}
	if settings.LogFormat == configs.LogJSON {
		return slog.New(slog.NewJSONHandler(out, o))
	}
	return slog.New(slog.NewTextHandler(out, o))
}

// bounded keeps what files and clients say in a record of the log short and printable.
func bounded(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(untrusted.Line(a.Value.String()))
	case slog.KindAny:
		if err, ok := a.Value.Any().(error); ok {
			a.Value = slog.StringValue(untrusted.Line(err.Error()))
		}
	}
	return a
}
