package cluster

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// The images that every node has. There is no registry: pods say imagePullPolicy: Never.
const (
	PauseImage   = "ebpf-cni.test/pause:1"
	AgnhostImage = "ebpf-cni.test/agnhost:1"
	coreDNSImage = "ebpf-cni.test/coredns:1"
	greetImage   = "ebpf-cni.test/greet:1"
)

// images maps their names to the program that is all their content.
var images = map[string]string{PauseImage: "pause", AgnhostImage: "agnhost", coreDNSImage: "coredns", greetImage: "greet"}

// agentFile holds the image of this project, as make image would build it.
const agentFile = "ebpf-cni.tar"

// imageFiles are the names of the files that writeImages writes.
func imageFiles() []string {
	files := []string{agentFile}
	for _, program := range images {
		files = append(files, program+".tar")
	}
	return files
}

// writeImages puts the images together as files that containerd imports.
func (c *Cluster) writeImages() error {
	for tag, program := range images {
		if err := writeImage(tag, c.Program(program), filepath.Join(c.Dir, program+".tar")); err != nil {
			return fmt.Errorf("put image %s together: %w", tag, err)
		}
	}
	return c.writeAgentImage()
}

// writeAgentImage makes the image of the cluster's copy of the binaries, under the name that the manifest has.
func (c *Cluster) writeAgentImage() error { return c.packAgent(agentFile, AgentImage, c.file("bin")) }

// packAgent has the project's own tool make an image out of the binaries in a directory.
func (c *Cluster) packAgent(file, name, binaries string) error {
	root, err := checkout()
	if err != nil {
		return err
	}
	cmd := exec.Command("go", "run", "./image", "-out", c.file(file), "-name", name, runtime.GOARCH+"="+binaries)
	cmd.Dir = filepath.Join(root, "tools/deploy")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("put image %s together: %w\n%s", name, err, out)
	}
	return nil
}

// AddAgentImage gives every node another image of this project: the binaries in a directory, under a name.
func (c *Cluster) AddAgentImage(ctx context.Context, name, binaries string) error {
	const file = "another.tar"
	if err := c.packAgent(file, name, binaries); err != nil {
		return err
	}
	for _, m := range c.Nodes {
		if err := c.importImage(ctx, m, file); err != nil {
			return err
		}
	}
	return nil
}

// writeImage makes an image of one static program, its entry point.
func writeImage(tag, program, target string) error {
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	base := filepath.Base(program)
	for _, dir := range []string{"tmp/", "etc/"} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o1777}); err != nil {
			return err
		}
	}
	if err := w.WriteHeader(&tar.Header{Name: base, Mode: 0o755, Size: int64(len(content))}); err != nil {
		return err
	}
	if _, err := w.Write(content); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		return err
	}
	image, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return err
	}
	// Without a platform containerd filters the image out.
	file, err := image.ConfigFile()
	if err != nil {
		return err
	}
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config = v1.Config{Entrypoint: []string{"/" + base}, Env: []string{"PATH=/"}}
	if image, err = mutate.ConfigFile(image, file); err != nil {
		return err
	}
	ref, err := name.NewTag(tag)
	if err != nil {
		return err
	}
	return tarball.WriteToFile(target, ref, image)
}
