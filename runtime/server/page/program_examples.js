// The examples of the program view: [name, body of a request to /v1/programs].

const say = (role, ...content) => ({ role, content });
const text = (value) => ({ text: value });
const variable = (name, ...index) => (index.length ? { var: name, index } : { var: name });

const tips = {
  variables: { topic: "a walk in the mountains" },
  defaults: { temperature: 0.4, max_tokens: 40, stop: [".", "\n"] },
  program: [
    say("user", text("What matters most for "), variable("topic"), text("?")),
    say("assistant", text("What matters most is"), { gen: { name: "advice" } }),
    say("user", text("Now a short tip of each kind.")),
    {
      fork: {
        branches: ["clothing", "food", "safety"].map((kind) => [say("assistant", text(`As for ${kind}, remember to`), { gen: { name: "tip" } })]),
      },
    },
    say("user", text("Clothing:"), variable("tip", 0), text("\nFood:"), variable("tip", 1), text("\nSafety:"), variable("tip", 2), text("\nWhich matters most?")),
    say("assistant", { select: { name: "best", choices: ["clothing", "food", "safety"] } }),
  ],
};

const essay = "The library should stay open on Sundays, because most people work during the week and cannot come on other days.";
const judge = {
  variables: { essay },
  defaults: { temperature: 0, max_tokens: 32, stop: [".", "\n"] },
  program: [
    say("user", text("Read this essay:\n"), variable("essay"), text("\nYou will be asked about it.")),
    {
      fork: {
        branches: ["clarity", "evidence", "style"].map((aspect) => [
          say("assistant", text(`The ${aspect} of this essay is`), { gen: { name: "judgement" } }),
          say("user", text(`How good is its ${aspect}?`)),
          say("assistant", { select: { name: "grade", choices: ["good", "fair", "poor"] } }),
        ]),
      },
    },
    say("user", text("Clarity: "), variable("grade", 0), text(", evidence: "), variable("grade", 1), text(", style: "), variable("grade", 2), text(". Sum up in a sentence.")),
    say("assistant", { gen: { name: "summary" } }),
  ],
};

const branch = (opening, depth) => [
  text(opening),
  { gen: { name: "thought", max_tokens: 30, stop: ["."] } },
  ...(depth ? [{ fork: { branches: [branch("\nSo,", depth - 1), branch("\nBut,", depth - 1)] } }] : []),
];
const tree = {
  variables: { question: "Should a small town build a swimming pool?" },
  defaults: { temperature: 0.8 },
  program: [variable("question"), { fork: { branches: [branch("\nOn the one hand,", 1), branch("\nOn the other hand,", 1)] } }],
};

const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 18, maximum: 99 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const crew = {
  defaults: { temperature: 1, max_tokens: 60 },
  program: [
    text("The crew of the ship, as JSON objects with name and age.\n"),
    {
      fork: {
        branches: ["Captain", "Cook"].map((job) => [text(`${job}: `), { gen: { name: "person", json_schema: schema, complete: true } }]),
      },
    },
    text("The ship is called "),
    { gen: { name: "ship", regex: "[A-Z][a-z]{2,9}", n: 3 } },
  ],
};

export const EXAMPLES = [
  ["Three tips: a fork and a choice", tips],
  ["Judge an essay: three aspects side by side", judge],
  ["Tree of thoughts: forks within forks", tree],
  ["A crew: JSON and samples", crew],
];
