package main

import (
	upstream "k8s.io/kubernetes/test/utils/image"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// standIn is what stands in an image's place, since there is no registry to pull it from, and in what it differs.
type standIn struct {
	id   upstream.ImageID
	says string
}

// standIns are the images that the tests pull, for the page.
var standIns = []standIn{
	{upstream.Agnhost, "agnhost and upstream's extra CoreDNS built from source, the latter at another release; on Debian's curl, wget, dig, nc, ip and shell instead of Alpine's, so that names are looked up by glibc, not by musl"},
	{upstream.BusyBox, "Debian's busybox"},
	{upstream.GlibcDnsTesting, "Debian's dig and glibc, of another release"},
	{upstream.Nginx, "Debian's nginx"},
	{upstream.Pause, "this project's own pause for tests"},
	{upstream.RegressionIssue74839, "built from source"},
}

// Where images find commands: Debian's first, or busybox's.
const (
	debianPath  = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/busybox"
	busyboxPath = "/busybox:/usr/bin"
)

// images are all that the tests pull, by upstream's names.
func (s suite) images(c *cluster.Cluster) map[string]cluster.Image {
	name := upstream.GetE2EImage
	agnhost := []string{c.Program("agnhost"), c.Program("coredns")}
	for _, file := range cluster.Certificate {
		agnhost = append(agnhost, s.program(file))
	}
	return map[string]cluster.Image{
		name(upstream.Agnhost):              {Base: s.base, Programs: agnhost, Command: []string{"pause"}, Path: debianPath},
		name(upstream.BusyBox):              {Base: s.base, Command: []string{"sh"}, Path: busyboxPath},
		name(upstream.GlibcDnsTesting):      {Base: s.base, Command: []string{"bash"}, Path: debianPath},
		name(upstream.Nginx):                {Base: s.base, Command: []string{"nginx", "-g", "daemon off;"}, Path: debianPath},
		name(upstream.Pause):                {Programs: []string{c.Program("pause")}},
		name(upstream.RegressionIssue74839): {Programs: []string{s.program("regression-issue-74839")}},
	}
}
