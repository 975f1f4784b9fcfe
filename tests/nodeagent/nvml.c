/* A library that stands in for NVML: what nvidia-ml-py asks of it here.
 *
 * The file $NVML_FILE says what it does, anew at each call: "hang", "lost" (the driver was
 * unloaded), or the percentages of the GPUs, -1 for one that does not tell (MIG). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };
struct utilization { unsigned gpu, memory; };

static int percent[16];

static int count(void)
{
	char text[256] = "";
	FILE *file = fopen(getenv("NVML_FILE"), "r");
	int found = 0;

	if (!file)
		return -1;
	text[fread(text, 1, sizeof(text) - 1, file)] = 0;
	fclose(file);
	while (!strncmp(text, "hang", 4))
		pause();
	if (!strncmp(text, "lost", 4))
		return -1;
	for (char *each = strtok(text, " \n"); each && found < 16; each = strtok(NULL, " \n"))
		percent[found++] = atoi(each);
	return found;
}

int nvmlInitWithFlags(unsigned flags) { return count() < 0 ? DRIVER_NOT_LOADED : SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *gpus)
{
	int found = count();

	if (found < 0)
		return DRIVER_NOT_LOADED;
	*gpus = found;
	return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
	*device = &percent[index];
	return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, struct utilization *told)
{
	if (*(int *)device < 0)
		return NOT_SUPPORTED;
	told->gpu = *(int *)device;
	told->memory = 1;
	return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Another"; }
