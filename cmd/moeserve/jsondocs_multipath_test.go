package main

import "maps"

// multipathDocs define the fields of bench multipath, as fieldDocs does.
var multipathDocs = map[string]string{
	"multipath:run":     "what measured, and when",
	"multipath:gpu":     "memory of the GPU that copies go to and come from, such as `gpu0`",
	"relays":            "memories of the other GPUs whose links copies may use, in this order",
	"rounds":            "measurements of each figure, of which it is the median",
	"links":             "rates of all links",
	"copy_bytes":        "size of each copy; they are queued",
	"pcie":              "one object for the link of each GPU to the host",
	"PCIeLink.gpu":      "memory of the GPU",
	"numa_node":         "NUMA node of the GPU, -1 if unknown",
	"h2d_bytes_per_s":   "copies from the host, nothing else going on",
	"d2h_bytes_per_s":   "copies to the host, nothing else going on",
	"both_bytes_per_s":  "sum of copies in both directions at once",
	"pairs":             "one object for each pair of GPUs, each measured alone",
	"PairLink.from":     "memory that is read",
	"PairLink.to":       "memory that is written",
	"roots":             "sets of links whose rates do not add up, in each direction",
	"sets":              "one object for each such set; none where all rates add up",
	"gpus":              "memories of the GPUs whose links these are",
	"alone_bytes_per_s": "sum of what each of them reaches alone",
	"static":            "static round-robin split of a copy over 1, 2, … paths, without the engine",
	"relay":             "copies over one relay by chunk size and number of buffers",
	"RelayCopies.relay": "memory of the relay",
	"chunk_bytes":       "size of a chunk",
	"depth":             "buffers of the relay, which is as many chunks as are on their way",
	"share_of_link":     "part of the rate of the relay's own link that this is",
	"paths":             "PCIe links that the copy uses; the first is the GPU's own",
	"own_bytes_per_s":   "rate of the same GPUs together when each copies its own data, all at once",
	"targets":           "what was to be reached",
	"what":              "what it is",
	"value":             "what was measured",
	"want":              "what it must be at least, or at most where `at_most` is true",
	"at_most":           "true: `want` is the maximum",
	"unit":              "unit of `value` and `want`",
	"reached":           "true: it was reached",

	"shared_h2d_bytes_per_s":       "its part while all GPUs copy from the host at once",
	"shared_d2h_bytes_per_s":       "its part while all GPUs copy to the host at once",
	"all_h2d_bytes_per_s":          "sum of all GPUs that copy from the host at once: no copy over several links can be faster",
	"all_d2h_bytes_per_s":          "the same of copies to the host",
	"all_both_bytes_per_s":         "sum of all GPUs in both directions at once",
	"all_peers_to_gpu_bytes_per_s": "sum of all other GPUs that copy to the GPU at once; 0: there is none",
	"gpu_to_all_peers_bytes_per_s": "sum of the GPU's copies to all others at once",
	"Root.bytes_per_s":             "what they reach together",
	"Static.points":                "one object for each direction and number of paths",
	"RelayCopies.points":           "one object for each direction, chunk size and number of buffers",
	"StaticPoint.bytes_per_s":      "rate of the copy, until the host sees that it has ended",
	"RelayPoint.bytes_per_s":       "rate of the copy, until the host sees that it has ended",
	"PairLink.bytes_per_s":         "rate of queued copies",
}

// multipathFigureDocs are those of the parts that measure the engine, and of the calibration.
var multipathFigureDocs = map[string]string{
	"sizes":                               "copies by size",
	"multipath:gpus":                      "a copy by the number of GPUs that take part",
	"traffic":                             "a copy beside plain copies of others",
	"engines":                             "two engines that copy at once",
	"cpu":                                 "processor time of copies to the GPU that follow one another",
	"chunks":                              "a copy over all links by chunk size and chunks in flight",
	"threshold":                           "copies that use relays at every size",
	"direct":                              "copies between two GPUs beside copies of all GPUs from the host",
	"native_s":                            "a copy over the GPU's own link without the engine, until the host sees that it has ended",
	"engine_s":                            "the same copy by the engine",
	"native_device_s":                     "a copy without the engine, until work of the GPU that waits for it goes on",
	"native_second_stream_s":              "a copy without the engine, until a second stream of the GPU goes on that waits for it by an event of the driver",
	"engine_device_s":                     "the same copy by the engine",
	"gpu_count":                           "GPUs whose links the copy uses",
	"static_bytes_per_s":                  "static round-robin split of the copy over the same links",
	"GPUPoint.engine_bytes_per_s":         "the engine",
	"TrafficPoint.engine_bytes_per_s":     "the engine",
	"TrafficPoint.links":                  "PCIe links that splits and engine use",
	"beside":                              "what others copy meanwhile",
	"native_bytes_per_s":                  "a copy over the GPU's own link",
	"even_bytes_per_s":                    "static split in equal parts",
	"uneven_bytes_per_s":                  "static split that gives one of two links two of three chunks: the one without traffic, or the relay's; 0: there are more links",
	"others_bytes_per_s":                  "rate of the others' copies beside the engine",
	"engine_waits_bytes_per_s":            "the engine in the mode that leaves links to others that use them",
	"others_beside_waiting_bytes_per_s":   "rate of the others' copies beside it",
	"other_processes":                     "the others over one link are processes of their own; false: streams of this one",
	"covered":                             "part of the time of the slowest copy in which others copied",
	"EnginePoint.gpus":                    "memories that the two engines copy to, or from",
	"EnginePoint.alone_bytes_per_s":       "the first engine alone",
	"each_bytes_per_s":                    "each engine, both at once",
	"together_bytes_per_s":                "bytes of both over the time until both have ended",
	"CPUPoint.links":                      "PCIe links that are used",
	"native":                              "true: copies without the engine",
	"cores":                               "processor time of the process over time",
	"cpu_s_per_gb":                        "processor time for each 10^9 bytes",
	"ChunkPoint.depth":                    "chunks in flight on each link",
	"ChunkPoint.bytes_per_s":              "rate of the copy, until the host sees that it has ended",
	"best":                                "of each direction the point with the fewest bytes in flight that reaches 99 % of the best rate",
	"Threshold.threshold_in_bytes":        "smallest size from which on copies from the host are faster over several links; 0: none",
	"Threshold.threshold_out_bytes":       "the same of copies to the host",
	"Direct.from":                         "memory that is read",
	"Direct.to":                           "memory that is written",
	"Direct.alone_bytes_per_s":            "nothing else going on",
	"beside_plain_bytes_per_s":            "beside plain copies of all GPUs from the host",
	"beside_engine_bytes_per_s":           "beside the same copies by one engine that may relay them",
	"relayed_fraction":                    "part of the engine's bytes that went over relays",
	"transferResult.multipath":            "calibration of copies over the links of several GPUs (`--calibrate` with `--peers`)",
	"Calibration.gpu":                     "memory of the GPU that was measured",
	"Calibration.relays":                  "memories of the GPUs that pay as relays, the one that gains most first",
	"Calibration.host_to_gpu_bytes_per_s": "rates with 0, 1, 2, … of the relays",
	"Calibration.gpu_to_host_bytes_per_s": "rates with 0, 1, 2, … of the relays",
	"Calibration.chunk_in_bytes":          "size of chunks to the GPU",
	"Calibration.chunk_out_bytes":         "size of chunks from the GPU",
	"Calibration.depth":                   "chunks in flight on each link",
	"Calibration.threshold_in_bytes":      "size of a copy to the GPU from which on relays pay; 0: there are none",
	"Calibration.threshold_out_bytes":     "size of a copy from the GPU from which on relays pay; 0: there are none",
	"Calibration.shared_roots":            "sets of GPUs whose links share a rate, in each direction",

	"beside_engine_no_direct_first_bytes_per_s": "beside an engine in which a GPU's own chunks have no precedence on its link: it takes those of the longest queue",
	"relayed_fraction_no_direct_first":          "part of the engine's bytes that went over relays then",
}

func init() {
	maps.Copy(fieldDocs, multipathDocs)
	maps.Copy(fieldDocs, multipathFigureDocs)
	for _, point := range []string{"Root", "StaticPoint", "RelayPoint", "SizePoint", "GPUPoint", "TrafficPoint", "EnginePoint", "ChunkPoint"} {
		fieldDocs[point+".direction"] = "`h2d`: host to GPU, `d2h`: GPU to host"
	}
	for _, part := range []string{"Static", "RelayCopies", "GPUs", "Traffic", "Engines", "CPU", "Chunks", "SizePoint"} {
		fieldDocs[part+".bytes"] = "size of a copy"
	}
	fieldDocs["Sizes.points"] = "one object for each direction and size"
	fieldDocs["Threshold.points"] = "one object for each direction and size"
	fieldDocs["GPUs.points"] = "one object for each direction and number of GPUs"
	fieldDocs["Traffic.points"] = "one object for each direction, number of links and traffic"
	fieldDocs["Engines.points"] = "one object for each direction and pair of GPUs"
	fieldDocs["CPU.points"] = "one object for native copies, and for each number of links"
	fieldDocs["Chunks.points"] = "one object for each direction, number of chunks in flight and chunk size"
}
