// Command coredns is CoreDNS for the tests, with the plugins that they and Kubernetes' own configure: all of its plugins bring the libraries of
// several clouds along, a quarter of what there is to compile for a cluster. The release is the newest that requires no newer
// module than Kubernetes does, so that the two share what they are built from.
package main

import (
	"github.com/coredns/coredns/coremain"

	// Plugins register themselves.
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

func main() { coremain.Run() }
