package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// versionInfo is what `version` prints.
type versionInfo struct {
	Version string `json:"version"`
	// Revision is the commit, where the build recorded it.
	Revision string `json:"revision"`
	Go       string `json:"go"`
	// Layout is the version of the maps that this binary can read.
	Layout uint32 `json:"layout"`
}

func newVersion(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of ebpfctl and of the maps that it reads",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := readVersion()
			if o.output == formatJSON || o.output == formatYAML {
				return writeDocument(o.stdout, o.output, v)
			}
			_, err := fmt.Fprintf(o.stdout, "ebpfctl version %s\n", versionText()) // as --version
			return err
		},
	}
}

func readVersion() versionInfo {
	v := versionInfo{Version: version, Go: runtime.Version(), Layout: wire.LayoutVersion}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, s := range build.Settings {
			if s.Key == "vcs.revision" {
				v.Revision = s.Value
			}
		}
	}
	return v
}

// versionText is the version for people, behind the program's name.
func versionText() string {
	v := readVersion()
	return fmt.Sprintf("%s (map layout %d, %s)", v.Version, v.Layout, v.Go)
}
