package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/models/safetensors"
	"github.com/moeserve/moeserve/models/tiny"
	"github.com/moeserve/moeserve/node/fault"
	"github.com/moeserve/moeserve/untrusted"
)

// BuiltIn is the name of the built-in model.
const BuiltIn = "built-in"

// Model is an opened model: its configuration and its files. Weights are read through Source.
type Model struct {
	// Name is the name of the preset, the directory, or BuiltIn.
	Name   string
	Config *models.Config
	Source models.Source
	// Files has the tokenizer and the chat templates; nil for a preset.
	Files fs.FS

	close func() error
}

// Close unmaps the files. The Source must not be read afterwards.
func (m *Model) Close() error {
	if m.close == nil {
		return nil
	}
	return m.close()
}

// Open opens the model that the settings name: it reads its configuration and the names and
// shapes of its tensors, but no weights. seed is that of dummy weights. Errors wrap
// fault.ErrModel or fault.ErrConfig.
func Open(s configs.Model, seed uint64) (*Model, error) {
	m, err := open(s, seed)
	if err != nil {
		return nil, err
	}
	switch {
	case s.NumHiddenLayers > 0 && s.LoadFormat != configs.LoadDummy:
		err = fault.Of(fault.ErrConfig, errors.New("--num-hidden-layers needs --load-format dummy: it cuts a model of random weights"))
	case m.Config.MoELayers() > 0:
		return m, nil
	case s.NumHiddenLayers > 0:
		err = fault.Of(fault.ErrConfig, fmt.Errorf("--num-hidden-layers %d leaves only dense layers, and so no experts; give more", s.NumHiddenLayers))
	default:
		err = fault.Of(fault.ErrModel, fmt.Errorf("%s has no experts: all of its layers are dense (mlp_only_layers and decoder_sparse_step in config.json); moeserve runs mixture-of-experts models", m.Name))
	}
	return nil, errors.Join(err, m.Close())
}

func open(s configs.Model, seed uint64) (*Model, error) {
	if s.Name == "" {
		return openBuiltIn()
	}
	if data, ok := configs.Preset(s.Name); ok {
		if s.LoadFormat != configs.LoadDummy {
			return nil, fault.Of(fault.ErrConfig, fmt.Errorf("%s is a preset, which has no weights; add --load-format dummy for random ones, or download the model (%s) and give its directory", s.Name, Download(configs.PresetRepository(s.Name))))
		}
		c, err := models.ParseConfig(data, "preset "+s.Name)
		if err != nil {
			return nil, fault.Of(fault.ErrModel, err)
		}
		return dummy(s, seed, s.Name, c, nil)
	}
	if err := Find(s.Name); err != nil {
		return nil, err
	}
	c, err := models.ReadConfig(s.Name)
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	files := untrusted.Dir(s.Name)
	if s.LoadFormat == configs.LoadDummy {
		return dummy(s, seed, s.Name, c, files)
	}
	if err := checkWeights(s.Name); err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	ck, err := safetensors.Open(s.Name)
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	return &Model{Name: s.Name, Config: c, Source: models.NewCheckpoint(ck), Files: files, close: ck.Close}, nil
}

func dummy(s configs.Model, seed uint64, name string, c *models.Config, files fs.FS) (*Model, error) {
	var err error
	if s.NumHiddenLayers > 0 {
		if c, err = c.WithLayers(s.NumHiddenLayers); err != nil {
			return nil, fault.Of(fault.ErrConfig, err)
		}
	}
	skew, err := s.ParseRouting()
	if err != nil {
		return nil, fault.Of(fault.ErrConfig, err)
	}
	if skew > 0 {
		if c, err = c.WithRoutingSkew(skew); err != nil {
			return nil, fault.Of(fault.ErrConfig, err)
		}
	}
	return &Model{Name: name, Config: c, Source: models.NewDummy(c, seed), Files: files}, nil
}

func openBuiltIn() (*Model, error) {
	files := tiny.FS()
	data, err := fs.ReadFile(files, "config.json")
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	c, err := models.ParseConfig(data, BuiltIn+" config.json")
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	if data, err = fs.ReadFile(files, "generation_config.json"); err == nil {
		if c, err = c.WithGeneration(data, BuiltIn+" generation_config.json"); err != nil {
			return nil, fault.Of(fault.ErrModel, err)
		}
	}
	weights, err := fs.ReadFile(files, safetensors.SingleFile)
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	ck, err := safetensors.Parse(BuiltIn+" "+safetensors.SingleFile, weights)
	if err != nil {
		return nil, fault.Of(fault.ErrModel, err)
	}
	return &Model{Name: BuiltIn, Config: c, Source: models.NewCheckpoint(ck), Files: files, close: ck.Close}, nil
}

// ConfigOnly reports whether a directory has a configuration but no weights.
func ConfigOnly(dir string) bool {
	if dir == "" {
		return false
	}
	if _, err := os.Stat(filepath.Join(dir, "config.json")); err != nil {
		return false
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	return err == nil && len(files) == 0
}
