// Package configs holds data that the rest of moeserve is configured with: the
// config.json of each model preset, descriptions of machines, and the settings of
// a run in groups, with their keys, defaults and limits. Settings with a few values are
// types (Tier, Place, Grouping, …) that every package uses; what others are written as,
// Parse methods of their groups read.
//
// It reads no files and knows neither flags nor environment; cmd/moeserve makes
// flags, MOESERVE_* variables and the keys of moeserve.yaml out of Schema.
//
//	data, ok := configs.Preset("mixtral-8x7b")
//	machine, ok := configs.Hardware("h200")
//	s := configs.Defaults()
//	s.Offload.Fraction, s.Offload.Tier = 0.5, configs.PeerTier
//	if err := s.Validate(); err != nil { … }
//
// # Invariants
//
//   - Every field of Settings' groups has exactly one entry of Schema, its key.
//   - Defaults are valid.
//   - Presets are as published, in the names of their time; package models tests
//     that each counts to the right number of parameters.
//   - Every figure of a hardware profile names its source, and none is above the
//     datasheet's peak. Names are found as people write them (FindHardware, Similar).
package configs
