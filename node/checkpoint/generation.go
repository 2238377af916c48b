package checkpoint

import (
	"fmt"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/models"
	"github.com/moeserve/moeserve/node/fault"
)

// Words of the setting generation-config that name no directory.
const (
	generationAuto = "auto"
	generationNone = "vllm"
)

// Generation reads the sampling parameters of requests that give none, as the settings ask for:
// the model's, those of another directory, or none, with what replaces single ones. path is the
// file that they come from, if there is one. Errors wrap fault.ErrModel or fault.ErrConfig.
func Generation(m configs.Model, s configs.Serve) (g models.Generation, path string, err error) {
	dir := s.GenerationConfig
	switch dir {
	case generationNone:
		dir = ""
	case generationAuto:
		dir = m.Name
		if _, preset := configs.Preset(dir); preset {
			dir = ""
		}
		if err := Find(dir); err != nil {
			return g, "", err
		}
	}
	if dir != "" {
		if g, path, err = models.ReadGeneration(dir); err != nil {
			return g, "", fault.Of(fault.ErrModel, err)
		}
		if path == "" && s.GenerationConfig != generationAuto {
			return g, "", fault.Of(fault.ErrConfig, fmt.Errorf("--generation-config: %s has no generation_config.json; give a directory that has one, %s or %s", dir, generationAuto, generationNone))
		}
	}
	if g, err = g.Override([]byte(s.OverrideGenerationConfig), "--override-generation-config"); err != nil {
		return g, "", fault.Of(fault.ErrConfig, err)
	}
	return g, path, nil
}
